"""What would not fit a real GPU at its true size does not run on a pretended one either.

A rehearsal builds narrow models, which have room everywhere. So each step that is about to run is
also planned at its true size; where that is more than the GPU has, CUDA's error is raised as a real
GPU would raise it. The plans' two figures are kept in build/pretended/needs, one file a step.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

from helpers.recipe import Recipe
from tight_fit.files import replace_all
from tools.course import ROOT
from tools.pretend import build, narrow

FOLDER = build.FOLDER / "needs"


def change_step(module: Any) -> None:
    """tight_fit.techniques.step: `train_step`, by which the course's training, its measured steps
    and loops of notebooks go, now raises OutOfMemoryError where the recipe's step has no room on
    the GPU at its true size. A plan calls it as well, with weights that have no values."""
    function = module.train_step
    takes = inspect.signature(function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        given = takes.bind(*args, **kwargs).arguments
        weight = next(given["model"].parameters())
        if isinstance(given["recipe"], Recipe) and not isinstance(weight.data, FakeTensor):
            refuse(given["recipe"], weight.device)
        return function(*args, **kwargs)

    module.train_step = run


def change_room(module: Any) -> None:
    """benchmarks.room: `has_room` now answers for a full model's step on one GPU at its true size.
    A step on several GPUs is judged as narrow as it runs."""
    function = module.has_room

    @wraps(function)
    def has_room(planned: Any, memory: int) -> bool:
        recipe = planned.recipe
        if isinstance(recipe, Recipe) and recipe.profile == "full":
            planned = SimpleNamespace(peak=need(recipe)[0])
        return function(planned, memory)

    module.has_room = has_room


def refuse(recipe: Recipe, device: Any) -> None:
    """Raises OutOfMemoryError where the recipe's step has no room on the GPU at its true size.

    It is taken to be alone on the GPU.
    """
    import torch

    from tight_fit import gpus
    from tight_fit.memory.plan import fit_on_gpu

    if recipe.profile != "full" or device.type != "cuda":
        return
    gpu = gpus.here()
    fit = fit_on_gpu(gpu, *need(recipe))
    if not fit:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. At its true size this step needs {fit.need:,} bytes, and the "
            f"pretended {gpu.name} has {gpu.memory:,}."
        )


@cache
def need(recipe: Recipe) -> tuple[int, int]:
    """(peak, overhead) in bytes of a recipe's plan for a GPU at its true size."""
    from helpers.plan import plan, plan_key

    key = json.dumps(plan_key(recipe).to_dict(), sort_keys=True)
    name = hashlib.sha256(f"{_code()}{key}".encode()).hexdigest()[:24] + ".json"
    try:
        peak, overhead = json.loads((FOLDER / name).read_text(encoding="utf8"))
    except (OSError, ValueError):
        planned = narrow.outside(plan)(recipe, "cuda")
        peak, overhead = planned.peak, planned.overhead
        with build.alone("needs"):  # two processes that replace one file trip over each other
            replace_all(FOLDER, {name: json.dumps([peak, overhead])})
    return peak, overhead


@cache
def _code() -> str:
    """Changes with everything that a plan is made of."""
    digest = hashlib.sha256()
    for folder in ("tight_fit", "helpers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
