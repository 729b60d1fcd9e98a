"""Lesson 24: a model whose text is split in zig-zag must make no mask, as the ring takes none."""

import pytest
import torch
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from scripts.context_parallel import positions
from tests.forked import forked, results
from tests.lessons.cells import own_code, the_cell
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
IN_FP32 = ("torch.bfloat16)", "torch.bfloat16, enabled=False)")
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_call_is_causal_and_has_no_mask(name, checkpointing, monkeypatch):
    config, kind = MODELS[name]
    model = kind(config(**SIZES, **HEADS, attn_implementation="sdpa")).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    calls, plain = [], functional.scaled_dot_product_attention

    def attend(*given, attn_mask=None, is_causal=False, **more):
        calls.append((attn_mask is not None, is_causal))
        return plain(*given, attn_mask=attn_mask, is_causal=is_causal, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    mine = positions(0, 2, 16)[None]  # what rank 0 of two has
    model(mine, position_ids=mine).logits.sum().backward()
    masked = set(calls)
    assert masked == ({(True, False)} if checkpointing else {(False, True)})  # what it is for
    calls.clear()
    assert "attention_mask=torch.ones_like(ids)" in the_cell("24", "def split_step(")
    no_padding = torch.ones_like(mine)
    model(mine, attention_mask=no_padding, position_ids=mine).logits.sum().backward()
    assert set(calls) == {(False, True)} and len(calls) >= 2


def test_a_plan_of_context_ranks_is_the_same_however_keys_go_round_here():
    """Lesson 24 sets it for the whole process, in which its reader goes on to plan."""
    config = LlamaConfig(**SIZES, **HEADS)
    one, other = (
        _sent_after(way, ModelStep(config, 1, 32, weights="fp32"))
        for way in ("allgather", "alltoall")
    )
    assert one == other and any(message.axis == "context" for message in one)


def _sent_after(way, job):
    set_rotate_method(way)
    return plan_step(job, parse("context=2")).sent


@pytest.fixture(autouse=True)
def as_it_was():
    """No test of another file is left with the ring that the lesson chooses."""
    yield
    set_rotate_method("allgather")


def test_its_program_trains_as_on_whole_texts_on_two_ranks(tmp_path):
    """In fp32, as numbers in 16 bits would hide a small error."""
    torch.manual_seed(0)
    config, kind = MODELS["llama"]
    kind(config(**SIZES | {"vocab_size": 96}, **HEADS)).save_pretrained(tmp_path)
    text = own_code("24", ("def in_chunks(", "def split_step(", "def train("), IN_FP32)
    for told in results(forked("tests/ranks/split_texts.py", text, tmp_path, ranks=2)):
        assert told["apart"] < 1e-3 * told["moved"] and told["moved"] > 0
