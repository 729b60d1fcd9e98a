"""Plans of fine-tunes of decoders on one GPU, by the fields that they have for it, byte by byte."""

import pytest
import torch
import torch.nn.functional as F
import transformers as library

from tests.night import few_by_day
from tests.plans.test_hf_model import TEXT, same, step, words
from tight_fit.plans.model import ModelStep, measured, plan_model_step
from tight_fit.techniques import four_bits

pytestmark = pytest.mark.filterwarnings("ignore")
LORA = {"lora_rank": 4}
ALL_LINEAR = {"lora_targets": "all-linear"}
FIELDS = [  # tests/core/test_pairs.py has every two fields together, of the course's decoder
    ("gpt2", {"loss": "chunked", "weights": "bf16", "checkpointing": True}),
    ("llama", {"loss": "chunked", "base": "bf16", "lora_scale": "alpha/sqrt(r)", **LORA}),
    ("qwen3", {"lora_targets": "o_proj,up_proj", **LORA}), ("gpt2", ALL_LINEAR | LORA),
]  # fmt: skip
NF4 = [
    ("llama", {"precision": "bf16", "checkpointing": True, **ALL_LINEAR}),
    ("llama", {"precision": "bf16", "weights": "fp32", "accumulation": 2}),  # as peft prepares it
    ("qwen3", {"precision": "bf16", "loss": "chunked", "optimizer": "adamw8bit"}),
    ("gpt2", {"precision": "bf16", **ALL_LINEAR}),  # biases
    ("bert", {"precision": "bf16"}),
    ("llama", {"frozen": 2, "attention": "eager"}),
]


@pytest.mark.parametrize("name, fields", few_by_day(FIELDS), ids=words)
def test_the_plan_is_what_real_tensors_take_to_the_byte(name, fields):
    asked = step(name, **fields)
    assert same(plan_model_step(asked, "cpu"), measured(asked))


class Written(torch.autograd.Function):
    """bitsandbytes' product as its documentation has it: a weight is written out where it is
    needed, by the library's own function on real tensors."""

    @staticmethod
    def forward(ctx, x, packed, state, bias):
        from bitsandbytes.functional import dequantize_4bit

        ctx.packed, ctx.state = packed, state
        return F.linear(x, dequantize_4bit(packed, state), bias)

    @staticmethod
    def backward(ctx, gradient):
        from bitsandbytes.functional import dequantize_4bit

        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return gradient @ dequantize_4bit(ctx.packed, ctx.state), None, None, None


@pytest.mark.parametrize("name, fields", NF4, ids=words)
def test_nf4_is_what_real_quantized_layers_take_to_the_byte(name, fields, monkeypatch):
    """On a CPU the library's product hides what it allocates; here it is done in the open."""
    asked = step(name, base="nf4", **LORA, **fields)
    planned = plan_model_step(asked, "cpu")
    in_the_open(monkeypatch)
    assert same(planned, measured(asked))


def in_the_open(monkeypatch) -> None:
    """Real quantized layers run the library's own forward pass, with `Written` as its product."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def product(A, B, quant_state, out=None, bias=None):
        return Written.apply(A, B, quant_state, bias)

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", product)
    # Without gradients a CPU that has these instructions packs weights anew, and a GPU never does.
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    own = bitsandbytes.nn.Linear4bit.forward
    monkeypatch.setattr(four_bits._layer_class(), "forward", own)


def test_a_loss_in_chunks_has_no_logits_of_all_tokens():
    """Counted by hand: nothing alive has as many elements as tokens × words."""
    config = library.LlamaConfig(**{**TEXT, "vocab_size": 5000})
    full, chunked = (
        plan_model_step(ModelStep(config, batch_size=64, length=24, loss=loss, **LORA), "cpu")
        for loss in ("full", "chunked")
    )
    logits = 64 * 24 * 5000 * 4
    assert full.peak - chunked.peak > 1.5 * logits
    biggest = [size for size, category, _ in chunked.largest_tensors if category == "activations"]
    assert max(biggest) < logits / 4


def test_blocks_that_do_not_divide_a_weight_are_refused():
    config = library.LlamaConfig(**{**TEXT, "hidden_size": 12, "num_attention_heads": 2})
    with pytest.raises(ValueError, match="do not divide the 12 × 12 weights of model.layers.0"):
        plan_model_step(ModelStep(config, length=8, base="nf4", lora_rank=2), "cpu")
