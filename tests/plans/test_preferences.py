"""Plans of DPO's and GRPO's steps against real tensors, a real `generate`, and formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as library

from benchmarks.measure_step import recorded
from tests.attack import refused
from tests.night import few_by_day
from tests.plans.test_hf_model import CONFIGS, same, step, words
from tests.plans.test_language_models import LORA, in_the_open
from tight_fit.gpus import find
from tight_fit.models.made import real
from tight_fit.plans.batch_line import BatchLines
from tight_fit.plans.model import (
    ModelStep,
    measured,
    plan_model_step,
)
from tight_fit.search.remedies import Remedies
from tight_fit.techniques.preferences import as_reference
from tight_fit.trace.storage_trace import PHASES

DPO, GRPO, NF4 = {"task": "dpo"}, {"task": "grpo"}, {"base": "nf4", **LORA}
CHUNKED = {"loss": "chunked"}
FIELDS = [
    ("gpt2", {**DPO, "precision": "bf16"}),
    ("qwen3", {**DPO, "reference": "precomputed", "weights": "bf16"}),
    ("llama", {**DPO, **CHUNKED, "precision": "bf16", "accumulation": 2}),
    ("gpt2", {**DPO, **LORA, "checkpointing": True}),
    ("qwen3", {**DPO, **LORA, **CHUNKED, "reference": "model"}),
    ("llama", {**DPO, "offload": "activations", "precision": "bf16"}),
    ("llama", {**DPO, "optimizer_in_backward": True, "max_grad_norm": None}),
    ("llama", {**GRPO, "offload": "optimizer"}),
    ("qwen3", {**GRPO, **CHUNKED, "completion": 4, "accumulation": 2}),
    ("llama", {**GRPO, **LORA, "reference": "adapters-off", "checkpointing": True}),
    ("gpt2", {**GRPO, "reference": "model", "precision": "bf16"}),
    ("qwen3", {**GRPO, "precision": "fp16", "frozen": 1}),
    ("llama", {**DPO, **NF4}),
    ("llama", {**DPO, **NF4, **CHUNKED, "reference": "model", "kbit": True}),
    ("llama", {**GRPO, **NF4, "reference": "model"}),
]


@pytest.mark.parametrize("name, fields", few_by_day(FIELDS), ids=words)
def test_the_plan_is_what_real_tensors_take_to_the_byte(name, fields, monkeypatch):
    asked = step(name, **fields)
    planned = plan_on_cpu(asked)
    if asked.base == "nf4":
        in_the_open(monkeypatch)
    assert same(planned, measured(asked))


def plan_on_cpu(asked):
    return plan_model_step(asked, "cpu")


def test_the_reference_is_the_base_whatever_the_adapters_have_learnt():
    asked = step("gpt2", **DPO, **LORA, checkpointing=True)
    model = real(asked).eval()
    ids = torch.arange(24)[None]
    before = model(input_ids=ids).logits
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert not torch.allclose(model(input_ids=ids).logits, before, atol=1e-3)
    with as_reference(model) as reference:
        assert torch.equal(reference(input_ids=ids).logits, before)
    assert not torch.allclose(model(input_ids=ids).logits, before, atol=1e-3)
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)


def generation(planned) -> int:
    """Bytes that generation takes at its peak above what there is before it."""
    total = planned.timeline.sum(axis=1)
    inside = planned.phases == PHASES.index("generation")
    return int(total[inside].max() - total[0])


def test_writing_takes_what_generate_takes():
    """By the record that PyTorch's own allocator keeps of transformers' `generate`."""
    asked = step("qwen3", **GRPO, completion=20)
    model = real(asked).model.eval()
    model.generation_config = library.GenerationConfig(eos_token_id=None, pad_token_id=0)
    prompt = torch.ones(4, 4, dtype=torch.int64)

    def write() -> None:
        sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
        assert model.generate(prompt, **sampled).shape == (4, 24)

    (_, record), planned = recorded(write), generation(plan_on_cpu(asked))
    assert 0 <= record - planned <= 4 * 99 * 4 + 1024  # a score per word, and ids
    heads, width = asked.config.num_key_value_heads, asked.config.head_dim
    cache = 4 * 24 * 3 * 2 * heads * width * 4  # rows, tokens, layers, keys and values, fp32
    assert cache < planned < 1.5 * cache


def test_all_completions_of_a_step_are_written_together():
    one, four = (plan_on_cpu(step("llama", **GRPO, accumulation=parts)) for parts in (1, 4))
    assert generation(one) == generation(four)
    assert four.peak < one.peak
    lines = BatchLines("cpu")
    for size in (8, 16, 24):
        asked = ModelStep(CONFIGS["llama"](), size, 24, accumulation=2, **GRPO)
        on_line, planned = (made(asked).timeline for made in (lines.plan, plan_on_cpu))
        assert np.array_equal(on_line.max(axis=0), planned.max(axis=0))


def test_fewer_tokens_that_are_written_have_fewer_logits():
    many, few = (plan_on_cpu(step("llama", **GRPO, completion=count)) for count in (23, 3))
    assert many.flops["forward"] - few.flops["forward"] == 2 * 20 * 4 * 64 * 99


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"reference": "model"}, "is for the tasks dpo and grpo"),
        ({"completion": 4}, "is for the tasks dpo and grpo"),
        ({**DPO, "reference": "none"}, "use one of model, adapters-off, precomputed"),
        ({**GRPO, "reference": "precomputed"}, "use one of none, model, adapters-off"),
        ({**DPO, "reference": "adapters-off"}, "give lora_rank"),
        ({**DPO, "completion": 4}, "is for grpo"),
        ({**GRPO, "completion": 24}, "completion"),
    ],
    ids=words,
)
def test_what_makes_no_step_says_why_in_one_sentence(fields, said):
    refused(ValueError, said, lambda: step("llama", **fields))


def test_only_decoders_learn_preferences():
    with pytest.raises(ValueError, match="no class of t5 for dpo"):
        ModelStep(library.T5Config(), **DPO)
    config = library.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match="keeps no keys and values"):
        plan_model_step(ModelStep(config, 2, 8, **GRPO), "cpu")


def test_what_would_fit_has_the_reference_computed_before():
    config = library.LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24
    )
    asked = ModelStep(config, batch_size=1, length=64, weights="bf16", **DPO)
    plans = [plan_model_step(change) for change in (asked, replace(asked, reference="precomputed"))]
    need = [planned.fits("RTX 3060").need for planned in plans]
    assert need[0] - need[1] > 2 * plans[0].parameters
    gpu = find(f"{-(-need[1] // 2**30)}GB")
    assert {"reference": "precomputed"} in Remedies(asked, gpu).changes()
