"""The operations of one optimizer step: of a recipe, of any Hugging Face model, of a step of one's
own.

A plan of memory traces the same step. Until the two share one pass, this is the second: `TraceOps`
where the plan has its `Tracker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from helpers import architectures, making, models, strangers
from helpers.on_cuda import OnCuda
from helpers.optimizers import make_optimizer
from helpers.plan import fake_batch
from helpers.recipe import Recipe
from helpers.step import train_step
from helpers.strangers import Stranger, _as_if_real
from helpers.timing.trace_ops import TracedOps, TraceOps
from helpers.tracker import steady_memory
from helpers.valueless import Stepping, Valueless

TRACED = 2  # micro-batches: the third and later ones do what the second does


def trace_recipe_ops(
    recipe: Recipe, change: Callable[[nn.Module], object] | None = None
) -> TracedOps:
    """The operations of one optimizer step of `recipe` on a GPU. `change` does to the model what it
    does in `plan`."""
    return _trace(recipe, models.empty, fake_batch, change)


def trace_model_ops(model: PretrainedConfig | str | Path, **fields) -> TracedOps:
    """The same for any Hugging Face model; arguments and errors are those of
    `strangers.plan_model`."""
    stranger = Stranger(architectures.read(model), **fields)
    with _as_if_real(), strangers._said_plainly(stranger):
        return _trace(stranger, making.empty, strangers.batch)


def trace_own_ops(
    setup: Callable[[], tuple[Sequence[nn.Module | torch.Tensor], Callable[[], object]]],
    mixed: bool = False,
    fused_attention: bool = True,
    steps: int = 2,
) -> TracedOps:
    """The operations of the last of `steps` steps of one's own; arguments and errors are those of
    `own.plan_own`."""
    if steps < 1:
        raise ValueError(f"steps={steps} must be 1 or more.")
    precision: Any = SimpleNamespace(precision="bf16" if mixed else "fp32")
    with (
        _as_if_real(),
        FakeTensorMode(allow_non_fake_inputs=True),
        Valueless(),
        OnCuda(precision, fused=fused_attention),
    ):
        made = setup()
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
            raise TypeError(
                "setup must return two things: a list of what is on the GPU, and the step, "
                "a function."
            )
        for _ in range(steps - 1):
            made[1]()
        with steady_memory(), TraceOps(automatic=True) as ops:
            made[1]()
    return ops.traced


def _trace(recipe, empty, make_batch, change=None) -> TracedOps:
    """One optimizer step on tensors without values, its optimizer's states in place."""

    def kernels():
        return OnCuda(recipe)

    count = min(recipe.accumulation, TRACED)
    begins: list[int] = []
    with FakeTensorMode(allow_non_fake_inputs=True), Valueless(), kernels():
        model = empty(recipe, recompute=kernels)
        if change is not None:
            change(model)
        optimizer, scaler = (
            make_optimizer(model, recipe),
            Stepping("cpu", enabled=recipe.precision == "fp16"),
        )
        for parameter in model.parameters():  # a first update, so that the optimizer has its states
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(torch.zeros(()))
        ops = TraceOps()

        def batches():
            for _ in range(count):
                ops.looking = False
                batch = make_batch(model, recipe)
                ops.looking = True
                begins.append(len(ops.traced.order))
                yield batch

        def phase(name: str) -> None:
            ops.phase(name)
            if name == "optimizer":
                begins.append(len(ops.traced.order))

        with steady_memory(), ops:
            train_step(
                model, optimizer, batches(), recipe.micro_batch * count, recipe, phase, scaler
            )
    if recipe.accumulation > count:
        ops.traced.repeat(begins[-2], begins[-1], recipe.accumulation - count)
    ops.traced.tf32 = recipe.precision == "tf32"
    return ops.traced
