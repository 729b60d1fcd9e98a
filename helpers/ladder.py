"""The techniques for one GPU: each beside the plain step, and one after the other as a ladder.

Each rung of the ladder changes one field of the same fine-tune. A rung can also be taken away from
the full stack, or be used alone. `rows` is the table of README and notebooks: what each technique
takes of a GPU, in bytes and seconds, by plan, for the models at full size.
"""

from __future__ import annotations

from collections.abc import Mapping

from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit import gpus
from tight_fit.checks import each_of_type, of_type, real, shown
from tight_fit.gpus import GPU
from tight_fit.kernels.step_seconds import lacks
from tight_fit.memory.plan import Plan
from tight_fit.units import size, span

START = Recipe("deberta-large", profile="full", length=512, batch_size=16)
SHORT = Recipe("deberta", profile="full", length=32, batch_size=4)  # too small for the ladder
FIRST = "fp32"
# Tokens per example. With the length of the start they determine the FLOPs of a step, which are a
# polynomial of degree two in the length.
SHORTER = (128, 256)
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


def rungs(start: Recipe, half: str = "bf16") -> dict[str, dict]:
    """{name: fields of the recipe that the rung changes}, in order; the first rung changes nothing.

    half  the 16-bit precision of the GPU: "bf16", or "fp16" where it has no bf16 (`GPU.bf16`)
    Raises ValueError for another precision.
    """
    of_type("start", start, Recipe)
    if half not in ("bf16", "fp16"):
        raise ValueError(
            f"half={shown(half)} is no 16-bit precision: use bf16, or fp16 for a GPU without it."
        )
    return {
        FIRST: {},
        "accumulation": {"accumulation": 4},
        "mixed precision": {"precision": half},
        "dynamic padding": {"padding": "dynamic"},
        "uniform padding": {"padding": "uniform"},
        "checkpointing": {"checkpointing": True},
        "8-bit optimizer": {"optimizer": "adamw8bit_embed32"},
        "freezing": {"frozen": start.layers // 2},
        "LoRA": {"lora_rank": 8},
    }


def climb(start: Recipe, steps: Mapping[str, dict] | None = None) -> dict[str, Recipe]:
    """{name: recipe} on the way up: each rung keeps what those before it changed.

    Raises TypeError for a start that is no `Recipe`, and for steps that are no dict of dicts;
    ValueError for a field that a recipe does not have.
    """
    of_type("start", start, Recipe)
    if steps is not None:
        each_of_type("steps", steps, dict)
    recipes, recipe = {}, start
    for name, change in (rungs(start) if steps is None else steps).items():
        recipes[name] = recipe = Recipe.from_dict(recipe.to_dict() | change)
    return recipes


def top(start: Recipe, steps: Mapping[str, dict] | None = None) -> Recipe:
    """The full stack: the recipe of the last rung."""
    return list(climb(start, steps).values())[-1]


def without(start: Recipe, steps: Mapping[str, dict] | None = None) -> dict[str, Recipe]:
    """{name: the full stack, but with the fields of this rung as they were at the start}.

    A rung whose fields a later rung sets again is left out: the full stack does not contain it.
    Raises what `climb` raises.
    """
    steps = rungs(start) if steps is None else steps
    full = top(start, steps)
    return {
        name: replace(full, **{field: getattr(start, field) for field in change})
        for name, change in steps.items()
        if change and _lasts(change, full)
    }


def alone(start: Recipe, steps: Mapping[str, dict] | None = None) -> dict[str, Recipe]:
    """{name: the start with the fields of this rung and no others}, for the rungs of `without`."""
    steps = rungs(start) if steps is None else steps
    return {name: replace(start, **steps[name]) for name in without(start, steps)}


def _lasts(change: dict, full: Recipe) -> bool:
    return all(getattr(full, field) == value for field, value in change.items())


def own_rate(recipe: Recipe, factor: float = 5.0) -> Recipe:
    """The recipe with a learning rate that suits adapters.

    It is a multiple of the one that suits training all weights (notebook 07).
    """
    of_type("recipe", recipe, Recipe)
    real("factor", factor, above=0)
    return replace(recipe, learning_rate=factor * recipe.peak_learning_rate)


def smallest(planned: Plan) -> tuple[GPU, str] | None:
    """(the GPU with the least memory that the planned step fits, precision to use on it).

    None where no GPU of the list holds it. A step in 16 bits may run on any GPU: in bf16 where the
    hardware has it, else in fp16, which needs a few bytes more for the loss scale.
    """
    if not isinstance(planned, Plan):
        raise TypeError(f"planned={shown(planned)} must be a plan: plan(recipe) gives one.")
    for gpu in sorted(gpus.GPUS.values(), key=lambda gpu: gpu.memory):
        if planned.fits(gpu):
            half = planned.recipe.precision in ("bf16", "fp16")
            return gpu, ("bf16" if gpu.bf16 else "fp16") if half else planned.recipe.precision
    return None


# What a T4 may choose from: all weights trained, in fp16.
T4 = {
    f"{16 // parts} examples at a time" + (", checkpointing" if again else ""): replace(
        START, precision="fp16", padding="uniform", accumulation=parts, checkpointing=again
    )
    for parts, again in ((4, False), (8, False), (4, True))
}


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
