"""Plans of DPO's and GRPO's steps against real tensors, a real `generate`, and formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as library

from benchmarks.measure_step import recorded
from tests.night import few_by_day
from tests.plans.test_language_models import CONFIGS, LORA, in_the_open, same, step, words
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

DPO, GRPO = {"task": "dpo"}, {"task": "grpo"}
FIELDS = [
    ("llama", DPO),
    ("gpt2", {**DPO, "precision": "bf16"}),
    ("qwen3", {**DPO, "reference": "precomputed", "weights": "bf16"}),
    ("llama", {**DPO, "loss": "chunked", "precision": "bf16", "accumulation": 2}),
    ("gpt2", {**DPO, **LORA, "checkpointing": True}),
    ("qwen3", {**DPO, **LORA, "reference": "model", "loss": "chunked"}),
    ("llama", GRPO),
    ("qwen3", {**GRPO, "completion": 4, "loss": "chunked", "accumulation": 2}),
    ("llama", {**GRPO, **LORA, "reference": "adapters-off", "checkpointing": True}),
    ("gpt2", {**GRPO, "reference": "model", "precision": "bf16"}),
    ("llama", {**DPO, "offload": "activations", "precision": "bf16"}),
    ("llama", {**DPO, "optimizer_in_backward": True, "max_grad_norm": None}),
    ("llama", {**GRPO, "offload": "optimizer"}),
    ("qwen3", {**GRPO, "precision": "fp16", "frozen": 1}),
]


@pytest.mark.parametrize("name, fields", few_by_day(FIELDS), ids=words)
def test_the_plan_is_what_real_tensors_take_to_the_byte(name, fields):
    asked = step(name, **fields)
    assert same(plan_model_step(asked, "cpu"), measured(asked))


@pytest.mark.parametrize(
    "fields",
    few_by_day(
        [
            DPO,
            {**DPO, "reference": "model"},
            {**DPO, "reference": "model", "kbit": True, "loss": "chunked"},
            {**GRPO, "reference": "model"},
            GRPO,
        ]
    ),
    ids=words,
)
def test_so_is_a_plan_with_weights_in_4_bits(fields, monkeypatch):
    asked = step("llama", **fields, base="nf4", **LORA)
    planned = plan_model_step(asked, "cpu")
    in_the_open(monkeypatch)
    assert same(planned, measured(asked))


def test_a_reference_takes_its_weights_and_a_pass():
    plans = {
        kind: plan_model_step(step("llama", **DPO, reference=kind), "cpu")
        for kind in ("model", "precomputed")
    }
    with_it, without = plans["model"], plans["precomputed"]
    weights = 4 * without.parameters
    assert with_it.parameters == without.parameters
    assert with_it.highest["parameters"] - without.highest["parameters"] >= weights
    assert with_it.highest["optimizer states"] == without.highest["optimizer states"]
    assert with_it.flops["forward"] == 2 * without.flops["forward"]
    assert with_it.flops["backward"] == without.flops["backward"]


def test_adapters_that_are_off_need_no_second_model():
    plain = plan_model_step(step("llama", **LORA), "cpu")
    pairs = plan_model_step(step("llama", **DPO, **LORA), "cpu")
    assert pairs.highest["parameters"] == plain.highest["parameters"]


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


def test_chunks_take_the_logits_out_of_all_passes():
    config = library.LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "vocab_size": 5000})
    full, chunked = (
        plan_model_step(ModelStep(config, batch_size=32, length=24, loss=loss, **DPO), "cpu")
        for loss in ("full", "chunked")
    )
    logits = 2 * 32 * 24 * 5000 * 4
    assert full.peak - chunked.peak > 2 * logits
    assert max(size for size, _, made in chunked.largest_tensors if made != "given") < logits / 4


def generation(planned) -> int:
    """Bytes that generation takes at its peak above what there is before it."""
    total = planned.timeline.sum(axis=1)
    inside = planned.phases == PHASES.index("generation")
    return int(total[inside].max() - total[0])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_writing_takes_what_generate_takes(name):
    """By the record that PyTorch's own allocator keeps of transformers' `generate`."""
    asked = step(name, **GRPO, completion=20)
    model = real(asked).model.eval()
    model.generation_config = library.GenerationConfig(eos_token_id=None, pad_token_id=0)
    prompt = torch.ones(4, 4, dtype=torch.int64)

    def write() -> None:
        sampled = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
        assert model.generate(prompt, **sampled).shape == (4, 24)

    (_, record), planned = recorded(write), generation(plan_model_step(asked, "cpu"))
    assert 0 <= record - planned <= 4 * 211 * 4 + 1024  # a score per word, and ids
    text = asked.config
    heads = getattr(text, "num_key_value_heads", text.num_attention_heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = 4 * 24 * 3 * 2 * heads * width * 4  # rows, tokens, layers, keys and values, fp32
    assert cache < planned < 1.5 * cache


def test_all_completions_of_a_step_are_written_together():
    one, four = (
        plan_model_step(step("llama", **GRPO, accumulation=parts), "cpu") for parts in (1, 4)
    )
    assert generation(one) == generation(four)
    assert four.peak < one.peak
    lines = BatchLines("cpu")
    for size in (8, 16, 24):
        for parts in (2, 4):
            asked = ModelStep(CONFIGS["llama"](), size, 24, accumulation=parts, **GRPO)
            assert np.array_equal(
                lines.plan(asked).timeline.max(axis=0),
                plan_model_step(asked, "cpu").timeline.max(axis=0),
            )


def test_fewer_tokens_that_are_written_have_fewer_logits():
    many, few = (
        plan_model_step(step("llama", **GRPO, completion=count), "cpu") for count in (23, 3)
    )
    assert many.flops["forward"] - few.flops["forward"] == 2 * 20 * 4 * 64 * 211


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"reference": "model"}, "is for the tasks dpo and grpo"),
        ({"completion": 4}, "is for the tasks dpo and grpo"),
        ({**DPO, "reference": "none"}, "use one of model, adapters-off, precomputed"),
        ({**GRPO, "reference": "precomputed"}, "use one of none, model, adapters-off"),
        ({**DPO, "reference": "adapters-off"}, "give lora_rank"),
        ({**DPO, "reference": "modle"}, "Did you mean 'model'"),
        ({**DPO, "completion": 4}, "is for grpo"),
        ({**GRPO, "completion": 24}, "completion"),
        ({**GRPO, "completion": 0}, "completion"),
        ({**GRPO, "completion": "4"}, "completion"),
    ],
    ids=words,
)
def test_what_makes_no_step_says_why_in_one_sentence(fields, said):
    with pytest.raises((ValueError, TypeError), match=said) as caught:
        step("llama", **fields)
    assert "\n" not in str(caught.value) and str(caught.value)[-1] in ".?"


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
