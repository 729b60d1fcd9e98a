"""Lesson 18: its lines for selective recomputation. It and lesson 14: why DDP is slower."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from tests.lessons.cells import facts_of, markdown_of, own_code, with_full
from tight_fit.gpus.specs import find_gpu
from tight_fit.kernels.step_seconds import operation_times
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.config import read
from tight_fit.models.step import ModelStep

PASSES = ("forward", "backward", "recompute")
STEPS = """
from transformers import LlamaConfig, LlamaForCausalLM
model, way = LlamaForCausalLM(LlamaConfig(**FULL)), {"context_fn": contexts}
model.to("cuda").train()
ENABLING
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ids = torch.randint(100, (4, 1024), device="cuda")
for _ in range(5):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_selective_recomputation_takes_what_is_planned(tmp_path):
    """Lesson 18: its lines, in the step that the plan calls selective; full takes 7 % less."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=16, tie_word_embeddings=False)
    (enabling,) = (
        line for line in own_code("18", ("FlopCounterMode",)).splitlines() if "_enable(" in line
    )
    text = own_code("18", ("def contexts(",)) + STEPS.replace("ENABLING", enabling.strip())
    facts = facts_of(tmp_path, with_full(config.to_dict(), text), "A100-80GB")
    job = ModelStep(config, 4, 1024, weights="fp32", precision="bf16", max_grad_norm=None)
    planned = plan_step(replace(job, checkpointing=True), parse("ddp=1"), selective=True)
    assert facts["peak"] == pytest.approx(planned.peak, rel=0.01)
    assert facts["seconds"] == pytest.approx(planned.seconds("A100-80GB").total, rel=0.05)


def test_lesson_14_says_why_ddp_is_slower_than_stage_2():
    """By what keeps the GPU busy, and for how long it waits."""
    text = markdown_of("14")
    assert "mostly because each GPU casts, copies and updates all parameters" in text
    job = ModelStep(read("Qwen/Qwen3-0.6B"), 4, 512, weights="fp32", precision="bf16")
    job = replace(job, checkpointing=True)
    ddp, stage_2 = (plan_step(job, parse(f"{name}=4")) for name in ("ddp", "zero2"))
    steps = [one.step_seconds("RTX 3060", "PCIe 3 x16") for one in (ddp, stage_2)]
    difference = steps[0].total - steps[1].total
    update, passes = (_more(ddp, stage_2, phases) for phases in (("optimizer",), PASSES))
    waits = sum(steps[0].exposed.values()) - sum(steps[1].exposed.values())
    shares = [part / difference for part in (update, passes, waits)]
    assert shares == pytest.approx([0.4, 0.4, 0.2], abs=0.03)
    moves = ("_to_copy", "copy_", "chunk_cat", "split_with_sizes_copy", "_foreach_copy_")
    assert _more(ddp, stage_2, PASSES, moves) > 0.6 * passes


def test_lesson_18_says_why_ddp_is_slower_than_what_it_takes():
    assert "DDP would take a quarter longer here: autocast casts the weights" in markdown_of("18")
    job = ModelStep.of("distilgpt2", batch_size=64, length=256, weights="fp32", precision="bf16")
    ddp, stage_2 = (plan_step(job, parse(f"{name}=2")) for name in ("ddp", "zero2"))
    steps = [one.step_seconds("RTX 3060", "PCIe 3 x16").total for one in (ddp, stage_2)]
    assert steps[0] / steps[1] == pytest.approx(1.25, abs=0.02)
    names = ("_to_copy", "mul", "add", "pow", "tanh", "tanh_backward")
    names += ("native_layer_norm", "native_layer_norm_backward")  # residuals, norms and GELU
    more = _more(ddp, stage_2, (*PASSES, "optimizer"))
    assert _more(ddp, stage_2, PASSES, names) > 0.8 * more


def _more(one, other, phases, names=()):
    """How many seconds longer one of two plans keeps an RTX 3060 busy, with operations of these
    names or all."""
    longer = 0.0
    for plan, sign in ((one, 1), (other, -1)):
        kernels = operation_times(plan.operations, find_gpu("RTX 3060")).kernels
        for (op, phase), times in plan.operations.counted().items():
            if phase in phases and (not names or op.name in names):
                longer += sign * times * kernels[op]
    return longer
