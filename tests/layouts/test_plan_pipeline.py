"""Pipelines of any decoder: against real ranks, against the model that is not cut, by formulas."""

import json

import pytest
import torch
import transformers as library

from tests.layouts.compared import on_ranks
from tests.ranks.laid_out import CONFIGURATIONS
from tight_fit.command.main import main
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.plan import plan_layout
from tight_fit.layouts.rank import local_step
from tight_fit.layouts.stages import TYPES, cut_decoder
from tight_fit.models.made import make, prepare
from tight_fit.models.step import ModelStep
from tight_fit.techniques import model_changes

FP32 = {"batch_size": 8, "length": 12, "weights": "fp32", "precision": "fp32", "accumulation": 4}
BF16 = FP32 | {"precision": "bf16"}


def stages(schedule="1f1b", **fields) -> Layout:
    return Layout(**{"strategy": "ddp", "pipeline": 2, "schedule": schedule} | fields)


FSDP = {"strategy": "fsdp", "data": 2}
# (fields of the step, layout, model, selective recomputation)
CASES = {
    2: [
        (FP32, stages("gpipe"), "qwen3", False),
        (FP32, stages("zero-bubble"), "qwen3", False),
        (BF16, stages("interleaved"), "qwen3", False),
        (BF16 | {"weights": "bf16"}, stages("1f1b"), "llama", False),
        (BF16 | {"accumulation": 2}, stages("gpipe", strategy="fsdp"), "llama", True),
    ],
    4: [
        (FP32, stages("interleaved", data=2), "qwen3", False),
        (FP32, stages("zero-bubble", **FSDP), "qwen3", False),
        (BF16, stages("1f1b", **FSDP, wrap="layers+embeddings"), "qwen3", False),
        (FP32 | {"checkpointing": True}, stages("1f1b", **FSDP, replicate=2), "llama", False),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_a_planned_stage_is_a_real_one(ranks):
    """Weights of the single process after two steps; peak, messages and FLOPs as planned."""
    for _, _, planned, real, at in on_ranks(CASES[ranks], ranks):
        assert real["parameters"] == real["expected"], at
        assert real["peak"] == planned.peak and real["at_peak"] == planned.at_peak, at


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MORE = {
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"head_dim": 8},
}


@pytest.mark.parametrize("kind", TYPES)
def test_stages_one_after_another_are_the_model(kind):
    """Logits and gradients, with a window that only some layers of Qwen2 have."""
    config = library.AutoConfig.for_model(kind, **SMALL, **MORE.get(kind, {}))
    step = ModelStep(config, batch_size=3, length=10, weights="fp32", accumulation=3)
    layout = stages(pipeline=3)
    torch.manual_seed(0)
    with model_changes.quiet():
        whole, copied = (prepare(make(step), step) for _ in range(2))
    copied.load_state_dict(whole.state_dict())
    ids = torch.randint(64, (2, 10))
    expected = whole(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    expected.sum().backward()
    local = local_step(step, layout)
    hidden = ids
    parts = [cut_decoder(copied.model, layout, rank, local)[rank] for rank in range(3)]
    for part in parts:
        hidden = part(hidden)
    torch.testing.assert_close(hidden.flatten(0, -2), expected)
    hidden.sum().backward()
    assert [len(part.body.layers) for part in parts] == [2, 2, 2]
    for (name, parameter), other in zip(whole.named_parameters(), copied.parameters()):
        torch.testing.assert_close(other.grad, parameter.grad, msg=name)


def deep(**fields) -> library.LlamaConfig:
    return library.LlamaConfig(**SMALL | {"num_hidden_layers": 8} | fields)


def test_a_step_takes_the_bubble_longer():
    """About (stages - 1) / micro-batches, half of it with two stages on a rank, a third of it where
    gradients of weights wait for a gap."""
    wide = deep(
        hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_hidden_layers=4
    )
    took = {}
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        planned = plan_layout(wide, stages(schedule), batch_size=16, length=512, accumulation=4)
        took[schedule] = planned.step_seconds("A100-40GB", "NVLink 3")
    bubble = took["1f1b"].bubble
    assert bubble / took["1f1b"].compute == pytest.approx(1 / 4, rel=0.15)
    assert took["gpipe"].bubble == pytest.approx(bubble, rel=0.05)
    assert took["interleaved"].bubble == pytest.approx(bubble / 2, rel=0.15)
    assert took["zero-bubble"].bubble == pytest.approx(bubble / 3, rel=0.15)
    assert all(time.exposed["pipeline"] > 0 for time in took.values())


@pytest.mark.parametrize(
    "fields, says",
    [({"context": 2}, "with data ranks only: leave context out"),
     ({"strategy": "zero1", "data": 2}, "write fsdp in place of zero1"),
     ({"strategy": "ddp", "data": 2, "schedule": "zero-bubble"}, "use fsdp, or the schedule"),
     ({"prefetch": 1}, "leave reshard, reshard_root and prefetch out"),
     ({"schedule": "pipedream"}, "schedule='pipedream'"),
     ({"pipeline": 1, "data": 8, "expert": 4, "prefetch": 1}, "prefetch=1 is not planned with exp"),
     ({"pipeline": 1, "gradient_as_bucket_view": True}, "how DDP works")],
)  # fmt: skip
def test_layouts_that_are_none(fields, says):
    with pytest.raises(ValueError, match=says):
        Layout(**{"strategy": "fsdp", "pipeline": 2} | fields)


ODD = {"accumulation": 5, "batch_size": 10}


@pytest.mark.parametrize(
    "config, layout, fields, says",
    [(deep(), stages(pipeline=3), {"batch_size": 18, "accumulation": 3},
      "8 layers cannot be divided evenly over"),
     (deep(), stages(pipeline=16), {"accumulation": 16}, "8 layers are too few for 16 stages"),
     (deep(), stages("interleaved", pipeline=8), {}, "too few for 16 stages .*2 on each rank"),
     (deep(), stages(pipeline=4), {"accumulation": 2}, "accumulation=4 or more"),
     (deep(), stages("interleaved"), ODD, "multiple of 2"),
     (deep(), stages("zero-bubble"), ODD, "multiple of 2"),
     (deep(), stages("zero-bubble"), {"checkpointing": True}, "use 1f1b, or leave recomp"),
     (deep(tie_word_embeddings=True), stages(), {}, "is its embeddings, one tensor for both"),
     (library.GemmaConfig(**SMALL), stages(), {}, "built as Llama is .* not for gemma"),
     (CONFIGURATIONS["bert"], stages(), {}, "not for bert with the task sequence"),
     (deep(), stages(), {"lora_rank": 4}, "lora_rank=4 is not planned with a pipeline"),
     (deep(), stages(), {"loss": "chunked"}, "loss='chunked' is not planned with"),
     (deep(), stages(), {"optimizer": "adamw", "precision": "fp16"}, "use bf16 or fp32"),
     (deep(), Layout(3, pipeline=2), {}, "use a multiple of 6")],
)  # fmt: skip
def test_steps_that_cannot_be_cut(config, layout, fields, says):
    asked = {"batch_size": 16, "length": 16, "accumulation": 2} | fields
    with pytest.raises(ValueError, match=says) as raised:
        plan_layout(config, layout, device="cpu", **asked)
    assert "\n" not in str(raised.value)
    assert not torch.distributed.is_initialized()


def test_the_command_says_which_stage_decides(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(deep().to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    step = ["--gpu", "A100-40GB", "--batch", "8", "--length", "64", "--accumulation", "4"]
    words = [str(path), *step, "--layout", "pipeline=2,fsdp=2", "--schedule", "gpipe"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "pipeline=2,fsdp=2 on 4 × A100-40GB, NVLink 3, schedule gpipe" in said
    assert "of the pipeline, which needs most, needs" in said
    assert "of bubble" in said and "pipeline, send" in said
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["need"] == max(facts["needs"]) == facts["needs"][facts["stage"]]
    parts = facts["seconds_of_work"] + facts["seconds_of_bubble"]
    assert facts["seconds"] == pytest.approx(parts + sum(facts["seconds_waiting"].values()))
    assert facts["schedule"] == "gpipe" and facts["gpus"] == 4
