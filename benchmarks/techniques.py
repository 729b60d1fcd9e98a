"""Each technique beside the plain step: what it takes of a GPU, in bytes and seconds, by plan.

The table of README and labs, for the models at full size. `make plans` keeps it for the labs.
"""

from __future__ import annotations

from typing import Any

from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit import gpus
from tight_fit.kernels.step_seconds import lacks
from tight_fit.memory.plan import Plan
from tight_fit.units import size, span

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


def shown() -> dict[str, Any]:
    """Rows and caption of the table that `helpers.show.techniques` gives."""
    caption = (
        "Plan for a GPU: peak of one optimizer step at full size, the smallest GPU that holds it, "
        "and the step's time, × what the plain step takes"
    )
    return {"rows": rows(), "caption": caption}


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
