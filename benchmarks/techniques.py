"""Techniques for one GPU, by plan: each beside the plain step, and as rungs of the ladder.

Tables of README and of notebooks, for models at full size. `make plans` keeps those of notebooks.
"""

from __future__ import annotations

from typing import Any

from helpers import ladder
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit import gpus
from tight_fit.kernels.step_seconds import lacks
from tight_fit.memory.plan import Plan
from tight_fit.units import number, size, span

MODELS = {
    "DeBERTa-v3-base, 16 × 256 tokens": Recipe(profile="full", batch_size=16, length=256),
    "ViT-B/16, 32 images": Recipe(profile="full", model="vit", batch_size=32),
}
# Each technique with the one field of the recipe that it changes.
TECHNIQUES: dict[str, dict] = {
    "plain fp32": {},
    "gradient accumulation, 4 micro-batches": {"accumulation": 4},
    "frozen embeddings and half of the layers": {"frozen": 6},
    "mixed precision, fp16": {"precision": "fp16"},
    "mixed precision, bf16": {"precision": "bf16"},
    "8-bit AdamW": {"optimizer": "adamw8bit"},
    "8-bit AdamW, embeddings in 32 bits": {"optimizer": "adamw8bit_embed32"},
    "gradient checkpointing": {"checkpointing": True},
    "LoRA, rank 8": {"lora_rank": 8},
}
TIMED = ("T4", "A100-40GB")  # the GPUs that the time of a step is planned for
LADDER = (
    "DeBERTa-v3-large, 16 examples of 512 tokens; fp32 without TF32 and fused AdamW where no rung "
    "says otherwise, eager attention, not compiled."
)


def shown() -> dict[str, dict[str, Any]]:
    """{name: rows and caption} of the tables that `helpers.show` gives of techniques."""
    caption = (
        "Plan for a GPU: peak of one optimizer step at full size, the smallest GPU that holds it, "
        "and the step's time, × what the plain step takes"
    )
    alone = {"rows": rows(), "caption": caption}
    return {"techniques": alone, "rungs": rungs(), "savings": savings()}


def rows() -> list[dict[str, str]]:
    """A row per technique: peak on a GPU for both models, and the smallest GPU that holds it; then
    the time of a step on each GPU of `TIMED`, for the plain step in seconds, for the others as a
    multiple of it. Whether that GPU holds the step is not asked. A plan takes a second or two.
    """
    table = []
    plain: dict[tuple[str, str], float] = {}
    for name, change in TECHNIQUES.items():
        row = {
            "technique": name,
            "recipe": ", ".join(f"{key}={value!r}" for key, value in change.items()) or "Recipe()",
        }
        for model, recipe in MODELS.items():
            planned = plan(replace(recipe, **change))
            row[model] = f"{size(planned.peak)}, {smallest_gpu(planned)}"
            row[f"step on {' / '.join(TIMED)}, {model.split(',')[0]}"] = " / ".join(
                _time(planned, gpu, plain.setdefault((model, gpu), planned.seconds(gpu).total))
                if planned.operations is None or not (lacking := lacks(planned.operations, gpu))
                else f"no {lacking}"
                for gpu in TIMED
            )
        table.append(row)
    return table


def _time(planned: Plan, gpu: str, plain: float) -> str:
    seconds = planned.seconds(gpu).total
    return span(seconds) if seconds == plain else f"× {seconds / plain:.2f}"


def smallest_gpu(planned: Plan) -> str:
    """The name of the GPU with the least memory that runs the planned step as it is."""
    for gpu in sorted(gpus.GPUS.values(), key=lambda gpu: gpu.memory):
        if planned.fits(gpu) and (planned.recipe.precision != "bf16" or gpu.bf16):
            return gpu.name
    return "no GPU"


def rungs() -> dict[str, Any]:
    """A row per rung: what it changes, the peak, FLOPs, and the smallest GPU that holds it."""
    changes = ladder.rungs(ladder.START)
    plans = {name: plan(recipe) for name, recipe in ladder.climb(ladder.START).items()}
    first = plans[ladder.FIRST]
    rows = []
    for name, rung in plans.items():
        fields = ", ".join(f"{field}={value!r}" for field, value in changes[name].items())
        smallest = ladder.smallest(rung)
        rows.append(
            {
                "rung": name,
                "adds": fields or "(start)",
                "peak": size(rung.peak),
                "of the start": f"{rung.peak / first.peak:.0%}",
                "FLOPs per step": number(_flops(rung)),
                "smallest GPU": f"{smallest[0].name} in {smallest[1]}" if smallest else "none",
            }
        )
    return {"rows": rows, "caption": f"Planned, nothing was run: {LADDER}"}


def savings() -> dict[str, Any]:
    """A row per technique: what it saves alone, on its rung, and taken away from the top."""
    start, full = plan(ladder.START), plan(ladder.top(ladder.START))
    climbed = {name: plan(recipe) for name, recipe in ladder.climb(ladder.START).items()}
    below = dict(zip(list(climbed)[1:], climbed.values()))
    alone, without = ladder.alone(ladder.START), ladder.without(ladder.START)
    rows = []
    for name in without:
        away = plan(without[name])
        rows.append(
            {
                "technique": name,
                "alone": size(start.peak - plan(alone[name]).peak),
                "on its rung": size(below[name].peak - climbed[name].peak),
                "taken away": size(away.peak - full.peak),
                "FLOPs without it": f"{_flops(away) / _flops(full) - 1:+.0%}",
            }
        )
    caption = f"Planned: bytes of the peak that each technique saves, asked in three ways: {LADDER}"
    return {"rows": rows, "caption": caption}


def _flops(planned: Plan) -> int:
    return sum(planned.flops.values())
