"""Steps laid over two GPUs, planned and measured: what each holds, and how long a step takes.

The layouts are those of lessons 13 to 16: DDP, ZeRO-1, FSDP2, tensor parallelism and a pipeline of
a decoder, by the ranks that the planner follows (`tight_fit.layouts`), over NCCL. The ranks measure
the link between the GPUs as well, so that the planned seconds do not rest on a guess about it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.apart import last_object
from benchmarks.proof import Step
from benchmarks.room import has_room
from helpers import models
from helpers.parallel import RankFailed, launch
from helpers.recipe import Recipe, replace
from tight_fit import gpus
from tight_fit.gpus.specs import of_device
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.plan import LayoutPlan, plan_step
from tight_fit.layouts.seconds import BEGIN, Link
from tight_fit.models.step import ModelStep

SCRIPT = Path(__file__).with_name("gpu_layout_ranks.py")
# Seconds of work of one step: about a minute to plan it, two for the ranks. A call of `make record`
# may have nine minutes, and ranks that wait for each other for ever should not take them all.
TIME_LIMIT = 180.0
LARGE, SMALL = 2**28, 4  # bytes of the all-reduces that measure the link
WAIT_LIMIT = 3600.0  # seconds, if nobody else looks at the ranks; waiting for the GPU is included
# Tensor ranks and stages need a decoder, and stages a head of its own. In fp32 any GPU runs it.
MODEL = "Qwen3-0.6B with an untied head, 4 × 256 tokens"
WHOLE = Recipe("decoder", profile="full", batch_size=4, length=256, weights="random")
# {technique: (its layout, micro-batches of a step)}
LAYOUTS = {
    "DDP on 2 GPUs": (parse("ddp=2"), 1),
    "FSDP2 (ZeRO-3) on 2 GPUs": (parse("fsdp=2"), 1),
    "tensor parallelism on 2 GPUs": (parse("tensor=2"), 1),
    "pipeline (1F1B, 4 micro-batches) on 2 GPUs": (parse("pipeline=2"), 4),
    "ZeRO-1 on 2 GPUs": (parse("zero1=2"), 2),  # with one micro-batch it would be ZeRO-2
}


def cases() -> list[tuple[str, str, Recipe]]:
    """(model, technique, recipe of the step of both GPUs together) of every step."""
    return [
        (MODEL, name, replace(WHOLE, accumulation=micro_batches))
        for name, (_, micro_batches) in LAYOUTS.items()
    ]


def step_of(recipe: Recipe) -> ModelStep:
    """A decoder's recipe as a step for the planner of layouts: fp32 weights, an untied head."""
    config = models.config(recipe)
    config.tie_word_embeddings = False
    return ModelStep(
        config,
        batch_size=recipe.batch_size,
        length=recipe.tokens,
        accumulation=recipe.accumulation,
        precision=recipe.precision,
        weights="fp32",
    )


def one(case: tuple[str, str, Recipe]) -> Step | None:
    """Plan and measure a step on two GPUs; None where their memory is too small.

    Raises RuntimeError where a rank fails or gives no answer, TimeoutError after `WAIT_LIMIT`.
    """
    (_, technique, recipe), gpu = case, gpus.here()
    layout = LAYOUTS[technique][0]
    planned = plan_step(step_of(recipe), layout)
    if not has_room(planned, gpu.memory):
        return None
    ranks = measure(recipe, layout)
    link = link_of(ranks)
    peaks = planned.allocator_peaks(gpu)
    return Step(
        *case,
        planned=planned.peak,
        allocated=max(rank["allocated"] for rank in ranks),
        reserved=max(rank["reserved"] for rank in ranks),
        planned_allocated=peaks.allocated,
        planned_reserved=peaks.reserved,
        seconds=max(rank["seconds"] for rank in ranks),
        planned_seconds=_seconds(planned, gpu.name, link),
        link={"bytes_per_second": link.speed, "latency": link.latency},
    )


def measure(recipe: Recipe, layout: Layout) -> list[dict[str, float]]:
    """What each rank measures: {"allocated", "reserved": bytes; "seconds": of a step; "large",
    "small": of an all-reduce of so many bytes}. Raises as `one`."""
    asked = json.dumps({"recipe": recipe.to_dict(), "layout": str(layout)})
    try:
        texts = launch(
            SCRIPT,
            asked,
            ranks=layout.ranks,
            timeout=WAIT_LIMIT,
            env=quiet(),
            show=False,
        )
    except RankFailed as error:
        raise RuntimeError(str(error).strip().splitlines()[-1]) from error
    return [last_object(text) for text in texts]


def quiet() -> dict[str, str]:
    """Variables of the ranks: NCCL says only what is wrong, for its words come between the answers.

    A longer log is written where NCCL_DEBUG_FILE names a file for it.
    """
    return {} if os.environ.get("NCCL_DEBUG_FILE") else {"NCCL_DEBUG": "WARN"}


def link_of(ranks: list[dict[str, float]]) -> Link:
    """The link between two GPUs, from their all-reduces: each sends as many bytes as it sums."""
    large, small = (min(rank[name] for rank in ranks) for name in ("large", "small"))
    return Link("measured", LARGE / large, max(0.0, (small - BEGIN) / 2))


def _seconds(planned: LayoutPlan, device: str, link: Link) -> float | None:
    """By plan, on GPUs that the driver names so; None where their speed is not known."""
    gpu = of_device(device)
    return None if gpu is None else planned.step_seconds(gpu, link).total
