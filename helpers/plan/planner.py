"""The planner: what a training step needs, before it runs.

`plan(recipe)` runs the real training step on tensors that have shapes but no values (`FakeTensorMode`) and follows
every storage. It needs no GPU, no weights and no data, and gives the same answer on every machine.

Target "cuda" plans for a GPU: sizes are rounded up to the 512 bytes that PyTorch's CUDA allocator hands out, and the
operations that differ there (dropout, autocast's list of fp32 operations) are replaced by the GPU's own. Target "cpu"
plans what the same step takes here, and is compared with real tensors to the byte in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from helpers import models
from helpers.memory.timeline import Plan, check_target, to_plan
from helpers.memory.trace import trace_step
from helpers.memory.tracker import StorageTrace
from helpers.optimizers import make_optimizer
from helpers.plan.cuda_kernels import CudaKernels
from helpers.plan.fake_tensors import FakeValues, NeverSkipScaler
from helpers.recipe import Recipe
from helpers.step import Batch
from helpers.torch_private import FakeTensorMode


def plan(
    recipe: Recipe, target: str = "cuda", change: Callable[[torch.nn.Module], object] | None = None
) -> Plan:
    """Plan one optimizer step of `recipe` on "cuda" or "cpu". Raises ValueError for another target.

    change    what else to do to the model (in place) before its optimizer is made, such as freezing by other names;
              inside it, the model's tensors have no values
    """
    if change is not None:
        return to_plan(trace_recipe(recipe, target, change), recipe, target)
    return replace(_plan(plan_key(recipe), target), recipe=recipe)


@lru_cache(maxsize=256)
def _plan(recipe: Recipe, target: str) -> Plan:
    return to_plan(trace_recipe(recipe, target), recipe, target)


def plan_key(recipe: Recipe) -> Recipe:
    """The recipe with everything at its default that changes no size: equal shapes share a plan."""
    plain = Recipe()
    return replace(
        recipe,
        seed=plain.seed,
        steps=plain.steps,
        learning_rate=None,
        warmup=plain.warmup,
        train_size=None,
        test_size=plain.test_size,
        weight_decay=plain.weight_decay,
        max_grad_norm=plain.max_grad_norm,
        weights=plain.weights,
        padding=plain.padding,
    )


def trace_recipe(
    recipe: Recipe,
    target: str,
    change: Callable[[torch.nn.Module], object] | None = None,
    empty: Callable[..., torch.nn.Module] = models.empty,
    make_batch: Callable[[torch.nn.Module, Recipe], Batch] | None = None,
) -> tuple[StorageTrace, int]:
    """(story of one step on fake tensors with its optimizer states in place, number of parameters).

    From the third micro-batch on nothing new happens, so at most two are traced.

    empty, make_batch  for a model that is not the course's: `empty(recipe, recompute=...)` makes it, as `models.empty`
                       does, and `make_batch(model, recipe)` a micro-batch of it, as `fake_batch` does
    """
    check_target(target)

    def kernels():
        return CudaKernels(recipe, active=target == "cuda")

    with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), kernels():
        model = empty(recipe, recompute=kernels)
        if change is not None:
            change(model)
        optimizer, scaler = (
            make_optimizer(model, recipe),
            NeverSkipScaler("cpu", enabled=recipe.precision == "fp16"),
        )
        for parameter in model.parameters():  # a first update, so that the optimizer has its states
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(torch.zeros(()))  # it makes its tensors when first used
        storage_trace = trace_step(
            model, optimizer, lambda: (make_batch or fake_batch)(model, recipe), recipe, scaler
        )
    return storage_trace, sum(parameter.numel() for parameter in model.parameters())


def fake_batch(model, recipe: Recipe) -> Batch:
    """One micro-batch without values, as `data.Encoded.batch` makes it; inside FakeTensorMode."""
    rows = recipe.micro_batch
    labels = torch.zeros(rows, dtype=torch.long)
    if recipe.task == "text":
        ids = torch.zeros(rows, recipe.tokens, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    shape = model.config
    return {
        "pixel_values": torch.zeros(rows, shape.num_channels, shape.image_size, shape.image_size),
        "labels": labels,
    }
