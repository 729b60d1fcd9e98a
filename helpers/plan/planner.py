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
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from helpers import models
from helpers.fields.settings import StepSettings
from helpers.language.four_bits import count_parameters
from helpers.memory.repeated_layers import RepeatedLayers, give_gradients
from helpers.memory.splice import NotAlike
from helpers.memory.timeline import Plan, check_target, to_plan
from helpers.memory.trace import trace_step
from helpers.memory.tracker import StorageTrace
from helpers.model_changes import as_if_real
from helpers.optimizers import make_optimizer
from helpers.plan.cuda_kernels import CudaKernels
from helpers.plan.fake_tensors import FakeValues, NeverSkipScaler
from helpers.recipe import Recipe
from helpers.step import Batch
from helpers.timing.trace_ops import Recorder
from helpers.torch_private import FakeTensorMode
from helpers.values import function, of_type


def plan(
    recipe: Recipe, target: str = "cuda", change: Callable[[torch.nn.Module], object] | None = None
) -> Plan:
    """Plan one optimizer step of `recipe` on "cuda" or "cpu".

    change  a further change of the model, in place, before its optimizer is made, such as freezing
            parameters by other names; inside it the model's tensors have no values
    Raises ValueError for another target, TypeError for what is no recipe and no function.
    """
    of_type("recipe", recipe, Recipe)
    check_target(target)
    if change is not None:
        function("change", change)
        return to_plan(trace_recipe(recipe, target, change), recipe, target)
    kept = _plan(plan_key(recipe), target)
    largest = list(kept.largest_tensors)
    return replace(kept, recipe=recipe, flops=dict(kept.flops), largest_tensors=largest)


@lru_cache(maxsize=256)
def _plan(recipe: Recipe, target: str) -> Plan:
    """The plan that is kept for the next call, so nobody may change its arrays."""
    made = to_plan(trace_recipe(recipe, target), recipe, target)
    for array in (made.timeline, made.phases):
        array.flags.writeable = False
    return made


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
        max_grad_norm=None if recipe.max_grad_norm is None else plain.max_grad_norm,
        lora_alpha=None,
        lora_scale=plain.lora_scale,
        compile=False,
        weights=plain.weights,
        padding=plain.padding,
    )


def fake_batch(model: torch.nn.Module, recipe: Recipe) -> Batch:
    """One micro-batch without values, as `data.Encoded.batch` makes it; inside FakeTensorMode.

    For text: input_ids and attention_mask, int64 [examples, tokens]. For images: pixel_values,
    fp32 [examples, channels, height, width]. Both have labels, int64 [examples]. For a language
    model: input_ids and labels, int64 [examples, tokens].
    """
    examples = recipe.micro_batch
    labels = torch.zeros(examples, dtype=torch.long)
    if recipe.tokens is not None:
        ids = torch.zeros(examples, recipe.tokens, dtype=torch.long)
        if recipe.task == "chat":
            return {"input_ids": ids, "labels": torch.zeros_like(ids)}
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
    all_layers: bool = False,
) -> tuple[StorageTrace, int]:
    """Trace one steady step on fake tensors: the optimizer has its states already.

    Returns (trace, number of parameters). From the third micro-batch on nothing new happens, so at
    most two micro-batches are traced.

    change             as for `plan`
    empty, make_batch  for a model that is not the course's: `empty(recipe, recompute=...)` makes it
                       as `models.empty` does, and `make_batch(model, recipe)` makes a micro-batch
                       for it as `fake_batch` does
    all_layers         True traces each layer; else those that repeat are traced once where that
                       is proven equal (`memory.splice`)
    Raises ValueError for a target other than "cuda" and "cpu".
    """
    check_target(target)

    def kernels():
        return CudaKernels(recipe, active=target == "cuda")

    def traced(all_layers: bool) -> tuple[StorageTrace, int]:
        with as_if_real(), FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), kernels():
            model = empty(recipe, recompute=kernels)
            if change is not None:
                change(model)
            repeated = None if all_layers else RepeatedLayers(model)
            if repeated is not None and not repeated.stacks:
                repeated = None
            optimizer = make_optimizer(model, recipe)
            scaler = NeverSkipScaler("cpu", enabled=recipe.precision == "fp16")
            # A first update, so that the optimizer makes its states.
            give_gradients(model.parameters())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(torch.zeros(()))  # the scaler makes its tensors when it is first used
            recorder = Recorder() if target == "cuda" else None
            batch = partial(make_batch, model, recipe)
            try:
                trace = trace_step(model, optimizer, batch, recipe, scaler, recorder, repeated)
            except Exception as error:
                if repeated is None:
                    raise
                raise NotAlike("A step without some of its layers fails.") from error
        return trace, count_parameters(model)

    if not all_layers:
        with suppress(NotAlike):
            return traced(all_layers=False)
    return traced(all_layers=True)
