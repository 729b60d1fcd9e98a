"""The planner: what a training step needs, before it runs.

`plan(recipe)` runs the real training step on fake tensors, which have shapes and no values
(`FakeTensorMode`), and follows every storage. It needs no GPU, no weights and no data, and gives
the same answer on every machine.

The target "cuda" plans for a GPU: sizes are rounded up to the 512 bytes of PyTorch's CUDA
allocator, and operations that differ there (dropout, autocast's list of fp32 operations) are
replaced by the GPU's own. The target "cpu" plans what the same step takes on a CPU; the tests
compare it with real tensors, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from helpers import models
from helpers.memory.timeline import Plan, check_target, to_plan
from helpers.memory.trace import trace_step
from helpers.memory.tracker import StorageTrace
from helpers.optimizers import make_optimizer
from helpers.plan.cuda_kernels import CudaKernels
from helpers.plan.fake_tensors import FakeValues, NeverSkipScaler
from helpers.recipe import Recipe, StepSettings
from helpers.step import Batch
from helpers.timing.trace_ops import Recorder
from helpers.torch_private import FakeTensorMode


def plan(
    recipe: Recipe, target: str = "cuda", change: Callable[[torch.nn.Module], object] | None = None
) -> Plan:
    """Plan one optimizer step of `recipe` on "cuda" or "cpu".

    change  a further change of the model, in place, before its optimizer is made, such as freezing
            parameters by other names; inside it the model's tensors have no values
    Raises ValueError for another target.
    """
    if change is not None:
        return to_plan(trace_recipe(recipe, target, change), recipe, target)
    return replace(_plan(plan_key(recipe), target), recipe=recipe)


@lru_cache(maxsize=256)
def _plan(recipe: Recipe, target: str) -> Plan:
    return to_plan(trace_recipe(recipe, target), recipe, target)


def plan_key(recipe: Recipe) -> Recipe:
    """The recipe with every field that changes no size at its default.

    Recipes with equal keys have equal plans.
    """
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


def fake_batch(model: torch.nn.Module, recipe: Recipe) -> Batch:
    """One micro-batch without values, as `data.Encoded.batch` makes it; inside FakeTensorMode.

    For text: input_ids and attention_mask, int64 [examples, tokens]. For images: pixel_values,
    fp32 [examples, channels, height, width]. Both have labels, int64 [examples].
    """
    examples = recipe.micro_batch
    labels = torch.zeros(examples, dtype=torch.long)
    if recipe.tokens is not None:
        ids = torch.zeros(examples, recipe.tokens, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    config: Any = model.config
    pixels = torch.zeros(examples, config.num_channels, config.image_size, config.image_size)
    return {"pixel_values": pixels, "labels": labels}


def trace_recipe(
    recipe: StepSettings,
    target: str,
    change: Callable[[torch.nn.Module], object] | None = None,
    empty: Callable[..., torch.nn.Module] = models.empty,
    make_batch: Callable[[Any, Any], Batch] = fake_batch,
) -> tuple[StorageTrace, int]:
    """Trace one steady step on fake tensors: the optimizer has its states already.

    Returns (trace, number of parameters). From the third micro-batch on nothing new happens, so at
    most two micro-batches are traced.

    change             as for `plan`
    empty, make_batch  for a model that is not the course's: `empty(recipe, recompute=...)` makes it
                       as `models.empty` does, and `make_batch(model, recipe)` makes a micro-batch
                       for it as `fake_batch` does
    Raises ValueError for a target other than "cuda" and "cpu".
    """
    check_target(target)

    def kernels():
        return CudaKernels(recipe, active=target == "cuda")

    with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), kernels():
        model = empty(recipe, recompute=kernels)
        if change is not None:
            change(model)
        optimizer = make_optimizer(model, recipe)
        scaler = NeverSkipScaler("cpu", enabled=recipe.precision == "fp16")
        # A first update, so that the optimizer makes its states.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(torch.zeros(()))  # the scaler makes its tensors when it is first used
        recorder = Recorder() if target == "cuda" else None
        storage_trace = trace_step(
            model, optimizer, lambda: make_batch(model, recipe), recipe, scaler, recorder
        )
    return storage_trace, sum(parameter.numel() for parameter in model.parameters())
