"""The planner: what a training step needs, before it runs.

`plan(recipe)` runs the real training step on fake tensors, which have shapes and no values
(`FakeTensorMode`), and follows every storage. It needs no GPU, no weights and no data, and gives
the same answer on every machine. It is the plan of the step of any model (`plans.model`), with the
course's batch; tests compare it with the course's own models, optimizers and loop.

The device "cuda" plans for a GPU: sizes are rounded up to the 512 bytes of PyTorch's CUDA
allocator, and operations that differ there (dropout, autocast's list of fp32 operations) are
replaced by the GPU's own. The device "cpu" plans what the same step takes on a CPU; the tests
compare it with real tensors, to the byte.

`plan_at` gives the plan at every other batch size and length in milliseconds, for sliders and
searches. `or_explain` turns an out-of-memory error into what is missing and what would fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from helpers import measure, models
from helpers.recipe import Recipe
from tight_fit import gpus
from tight_fit.checks import function, of_type
from tight_fit.gpus import GPU
from tight_fit.memory.plan import Plan, check_device, to_plan
from tight_fit.models.made import FlatLogits
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import trace_model_step
from tight_fit.search.remedies import Remedies
from tight_fit.techniques.base_weights import widen_heads
from tight_fit.techniques.step import Batch
from tight_fit.trace.storage_trace import StorageTrace
from tight_fit.units import size

T = TypeVar("T")
TASKS = {"text": "sequence-classification", "image": "image-classification", "chat": "causal-lm"}
ROOM = 0.05  # fraction of the memory that stays free, for what a plan cannot know


def plan(
    recipe: Recipe, device: str = "cuda", change: Callable[[torch.nn.Module], object] | None = None
) -> Plan:
    """Plan one optimizer step of `recipe` on "cuda" or "cpu".

    change  a further change of the model, in place, before its optimizer is made, such as freezing
            parameters by other names; inside it the model's tensors have no values
    Raises ValueError for another device, TypeError for what is no recipe and no function.
    """
    of_type("recipe", recipe, Recipe)
    check_device(device)
    if change is not None:
        function("change", change)
        return to_plan(trace_recipe(recipe, device, change), recipe, device)
    kept = _plan(plan_key(recipe), device)
    largest = list(kept.largest_tensors)
    return replace(kept, recipe=recipe, flops=dict(kept.flops), largest_tensors=largest)


@lru_cache(maxsize=256)
def _plan(recipe: Recipe, device: str) -> Plan:
    """The plan that is kept for the next call, so nobody may change its arrays."""
    made = to_plan(trace_recipe(recipe, device), recipe, device)
    for array in (made.timeline, made.phases):
        array.flags.writeable = False
    return made


def remedies_of(recipe: Recipe, gpu: GPU) -> Remedies:
    """What would make the step of a recipe fit a GPU: plans around it, each made once."""
    return Remedies(recipe, gpu, planning=plan)


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


def step_of(recipe: Recipe) -> ModelStep:
    """The step of a recipe as the planner of any model takes it."""
    fields = {field.name for field in dataclasses.fields(ModelStep)} - {"config", "weights"}
    given = {name: getattr(recipe, name) for name in fields if hasattr(recipe, name)}
    # The configuration has the classes. Without `frozen` peft would put adapters beside the linear
    # layers of a new head as well.
    given |= {"task": TASKS[recipe.task], "classes": None, "length": recipe.tokens}
    given |= {"frozen": recipe.frozen or 0} if recipe.lora_rank is not None else {}
    return ModelStep(models.config(recipe), **given)


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
    recipe: Recipe,
    device: str,
    change: Callable[[torch.nn.Module], object] | None = None,
) -> tuple[StorageTrace, int]:
    """The trace of which a plan is made, and the number of the model's parameters.

    It is the planner's of any model, with the course's batch: text has padding, and the labels of a
    language model are its tokens. A new head stays in fp32 beside frozen weights in fewer bits.
    """

    def changed(flat: FlatLogits) -> None:
        if recipe.base != "fp32" and recipe.lora_rank is not None:
            widen_heads(flat.model, models.NEW_HEADS)
        if change is not None:
            change(flat.model)

    def make_batch(flat: FlatLogits, step: ModelStep) -> Batch:
        return fake_batch(flat.model, recipe)

    return trace_model_step(step_of(recipe), device, make_batch=make_batch, change=changed)


def fitting(*recipes: Recipe) -> list[Recipe]:
    """The recipes with the fewest micro-batches per step with which all of them fit this machine.

    All get the same accumulation, so that two that differ in one field still do: that of the first
    one, or the next of its doubles that divides the batch. A sentence is printed where it changes.
    By plan, of the GPU's whole memory less `ROOM`. Recipes of the mini profile stay as they are.
    Raises TypeError for what is no recipe.
    """
    for recipe in recipes:
        of_type("recipe", recipe, Recipe)
    if all(recipe.profile == "mini" for recipe in recipes):
        return list(recipes)
    first, gpu = recipes[0], gpus.here()
    counts = [first.accumulation]
    while not any(recipe.batch_size % (2 * counts[-1]) for recipe in recipes):
        counts.append(2 * counts[-1])
    parts = [[replace(recipe, accumulation=count) for recipe in recipes] for count in counts]
    found = next((these for these in parts if all(_fits(one, gpu) for one in these)), None)
    if found is None:
        print(
            f"By plan {gpu.name} does not hold this step even in {counts[-1]} micro-batches: set "
            "TIGHT_FIT_PROFILE=mini and restart the kernel."
        )
        return parts[-1]
    if found != parts[0]:
        print(
            f"To fit {gpu.name}, each step runs in {found[0].accumulation} micro-batches of "
            f"{found[0].micro_batch}, by plan."
        )
    return found


def _fits(recipe: Recipe, gpu: GPU) -> bool:
    return plan(recipe, gpus.device_of(gpu)).fits(gpu).need <= (1 - ROOM) * gpu.memory


# Whether a micro-batch is a single example -> its sizes that are traced. A single example takes
# other operations (there is nothing to transpose), so it has an interpolation of its own.
EXAMPLES = {False: (2, 3), True: (1,)}
LENGTHS = (24, 40, 64)  # tokens
CHECK = {False: (5, 56), True: (1, 56)}  # (examples, tokens) of the trace that checks the others


class PlanInterpolation:
    """`PlanInterpolation(recipe, device).plan(recipe with another batch_size or length)`.

    The same operations run whatever the shape; only sizes change. A storage of a transformer holds
    (a + b * examples) * (1, length, length^2) elements. So six traces of small shapes give the size
    of each storage as a polynomial, and a seventh trace, at another shape, checks all of them. The
    peak is then found on the recomputed timeline, wherever it moves.

    Making one takes seconds; each plan then takes milliseconds. Raises RuntimeError if the sizes of
    the model's storages are no such polynomial.
    """

    def __init__(self, recipe: Recipe, device: str):
        self.recipe, self.device = recipe, device
        self.single = recipe.micro_batch == 1
        text = recipe.tokens is not None
        points = [
            (examples, length)
            for examples in EXAMPLES[self.single]
            for length in (LENGTHS if text else (None,))
        ]
        traces = [trace_recipe(_resized(recipe, *point), device)[0] for point in points]
        examples, length = CHECK[self.single]
        check = (examples, length if text else None)
        self.trace, self.parameters = trace_recipe(_resized(recipe, *check), device)
        if any(trace.events != self.trace.events for trace in traces):
            raise RuntimeError(
                "This model takes other operations at other shapes: plan each shape by itself."
            )
        basis = np.array([self._basis(*point) for point in points])
        self.coefficients = np.linalg.solve(basis, np.array([*map(_numbers, traces)], dtype=float))
        if not np.array_equal(self._evaluate(*check), _numbers(self.trace)):
            raise RuntimeError(
                "This model's sizes are no polynomial of examples and length: "
                "plan each shape by itself."
            )

    def _evaluate(self, examples: int, length: int | None) -> np.ndarray:
        """int64 [storages and phases], their bytes and FLOPs at a shape."""
        values = np.array(self._basis(examples, length)) @ self.coefficients
        return np.rint(values).astype(np.int64)

    def _basis(self, examples: int, length: int | None) -> list[float]:
        powers = (1, length, length**2) if length else (1,)
        factors = (1,) if self.single else (1, examples)
        return [factor * power for factor in factors for power in powers]

    def plan(self, recipe: Recipe) -> Plan:
        """The plan of a recipe that differs only in batch_size, length or accumulation.

        Raises ValueError for any other difference, and where one of the two recipes has a single
        example per micro-batch and the other has several.
        """
        if _key(recipe) != _key(self.recipe):
            raise ValueError(
                "This interpolation was made for a recipe that differs in more than batch size and "
                "length, or has one example per micro-batch where the other has several."
            )
        numbers = self._evaluate(recipe.micro_batch, recipe.tokens)
        sizes, flops = np.split(numbers, [len(self.trace.bytes)])
        plan = to_plan((self.trace, self.parameters), recipe, self.device, sizes)
        repeats = recipe.accumulation / min(recipe.accumulation, 2)  # two micro-batches are traced
        counts = (int(count * repeats) for count in flops)
        return replace(plan, flops=dict(zip(self.trace.flops, counts)))


def _numbers(trace: StorageTrace) -> list[int]:
    """Bytes of each storage, and FLOPs of each phase."""
    return [*trace.bytes, *trace.flops.values()]


def interpolation(recipe: Recipe, device: str = "cuda") -> PlanInterpolation:
    """The interpolation that a recipe's plan lies on, made once and kept."""
    return _interpolation(_key(recipe), device)


def plan_at(plan: Plan, batch_size: int | None = None, length: int | None = None) -> Plan:
    """The plan of the same recipe with another batch size or length (tokens).

    The first call for a recipe makes its interpolation (seconds), each further one takes
    milliseconds. Raises TypeError for the plan of a step that is not a `Recipe`, ValueError for a
    shape that a recipe cannot have.
    """
    of_type("plan", plan, Plan)
    if not isinstance(plan.recipe, Recipe):
        raise TypeError("Only the plan of a Recipe is known at other shapes: plan the other step.")
    changed = plan.recipe
    if batch_size is not None:
        changed = replace(changed, batch_size=batch_size)
    if length is not None:
        changed = replace(changed, length=length)
    return interpolation(changed, plan.device).plan(changed)


@lru_cache(maxsize=32)
def _interpolation(recipe: Recipe, device: str) -> PlanInterpolation:
    return PlanInterpolation(recipe, device)


def _resized(recipe: Recipe, examples: int, length: int | None) -> Recipe:
    """The recipe with `examples` per micro-batch, in one or two micro-batches.

    More than two do not change the trace.
    """
    micro_batches = min(recipe.accumulation, 2)
    return replace(
        recipe,
        batch_size=examples * micro_batches,
        accumulation=micro_batches,
        length=length if recipe.tokens is not None else None,
    )


def _key(recipe: Recipe) -> Recipe:
    """The same for all recipes that share an interpolation."""
    return _resized(plan_key(recipe), *CHECK[recipe.micro_batch == 1])


class OutOfMemory(RuntimeError):
    """A fine-tune did not fit; the message says by how much and which fields would make it fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's own error and for the CPU allocator's, which is a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def or_explain(recipe: Recipe, work: Callable[[], T]) -> T:
    """Return what `work()` returns.

    Raises OutOfMemory where memory does not suffice for it, after everything that the failed step
    held has been released.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the handler nothing refers to the frames of the failed step any more, so its tensors
    # can be freed.
    measure.release()
    raise OutOfMemory(explain(recipe))


def explain(recipe: Recipe, gpu: GPU | None = None) -> str:
    """One sentence of diagnosis and one of remedies for a recipe on a GPU (None: this machine)."""
    gpu = gpu or gpus.here()
    fit = plan(recipe, gpus.device_of(gpu)).fits(gpu)
    if fit:
        return (
            f"Out of memory, although the plan needs only {size(fit.need)} of the "
            f"{size(gpu.memory)} of {gpu.name}: something else holds memory there; "
            "restart other notebooks and try again."
        )
    diagnosis = (
        f"Out of memory: the plan needs {size(fit.need)}, {size(fit.over)} more than the "
        f"{size(gpu.memory)} of {gpu.name}."
    )
    changes = remedies_of(recipe, gpu).changes()
    if not changes:
        return (
            f"{diagnosis} No field of the recipe makes it fit: "
            "take a smaller model, shorter examples or a larger GPU."
        )
    options = " or ".join(
        ", ".join(f"{name}={value!r}" for name, value in change.items()) for change in changes
    )
    return f"{diagnosis} These fit: {options}."
