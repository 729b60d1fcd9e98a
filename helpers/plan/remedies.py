"""What would fit: the smallest changes of a step that a GPU holds, and the largest batch.

One set of rules serves a `Recipe` and the step of any other model (`ModelStep`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from helpers.gpus import GPU
from helpers.memory.timeline import Plan, fit_on_gpu
from helpers.plan.hf_model import ModelStep
from helpers.plan.hf_plan import plan_model_step
from helpers.plan.planner import plan
from helpers.recipe import Recipe, StepSettings

Change = dict[str, Any]  # {field of the step: new value}

LIMIT = 2**20  # examples per micro-batch; larger ones are not searched for
SHALLOW = 2, 3  # layers of the models that are planned before the whole one


def target_of(gpu: GPU) -> str:
    """What to plan for: "cuda", or "cpu" for a machine without a GPU (capability 0.0)."""
    return "cpu" if gpu.capability == (0, 0) else "cuda"


class Remedies:
    """Plans around one step for one GPU; each is made once.

    `changes()` are the changes of the step that fit, `largest_batch()` its largest batch size.
    """

    def __init__(self, step: StepSettings, gpu: GPU):
        self.step, self.gpu, self.target = step, gpu, target_of(gpu)
        self._plans: dict[tuple, Plan] = {}
        self._layers = _layers_to_leave_out(step)

    def plan(self, change: Change | None = None, layers: int | None = None) -> Plan:
        """The plan of the step with a change, or of the same model with fewer layers.

        Raises ValueError or TypeError where the step does not take the change, and
        ModuleNotFoundError where a library that it needs is not installed.
        """
        change = {
            name: value
            for name, value in (change or {}).items()
            if value != getattr(self.step, name)
        }
        key = layers, *sorted(change.items())
        if key not in self._plans:
            step = replace(self.step, **change)
            if layers is not None and isinstance(step, ModelStep):
                config = copy.deepcopy(step.config)
                config.num_hidden_layers = layers
                step = replace(step, config=config)
            self._plans[key] = _plan_any(step, self.target)
        return self._plans[key]

    def fits(self, change: Change) -> bool:
        """Whether the GPU holds the step with a change; False where the step does not take it."""
        try:
            return not self._surely_too_much(change) and self._over(change) <= 0
        except (ValueError, ModuleNotFoundError):
            return False

    def changes(self) -> list[Change]:
        """The changes of the step that fit, in the order of what they ask of the training.

        These are single changes: the smallest accumulation, half precision, 8-bit AdamW,
        checkpointing, LoRA. Where none of them suffices alone, the list holds one change of several
        fields, none of which can be left out. It is empty if nothing fits or nothing is needed.
        Raises what `plan` raises for the step as it is.
        """
        self.plan()
        if self.fits({}):
            return []
        single = [self._smallest_accumulation({})]
        single += [change for change in self._other_changes() if self.fits(change)]
        return [change for change in single if change] or self._several_changes()

    def largest_batch(self) -> int | None:
        """Examples per optimizer step of the largest batch that fits, with all else as it is.

        It is a multiple of the accumulation; the next multiple was planned, too, and does not fit.
        None where not even one example per micro-batch fits.
        """
        start = self.step.micro_batch
        if self._layers:
            start = max(1, largest_that_fits(lambda size: self._over_at(size, shallow=True), start))
        return largest_that_fits(self._over_at, start) * self.step.accumulation or None

    # -- does it fit? ------------------------------------------------------------------------------

    def _over(self, change: Change) -> float:
        """Bytes beyond the GPU's memory, negative where there is room.

        The allocator's overhead counts only where the rest leaves room for it, because to simulate
        it takes time.
        """
        planned = self.plan(change)
        over = planned.fits(self.gpu, allocator=False).over
        return over if over > 0 else planned.fits(self.gpu).over

    def _over_shallow(self, change: Change) -> float:
        """A lower bound of `_over` from the plans of two models with few layers, made in no time.

        As a function of the number of layers the peak is the largest of several lines. So the line
        through two points at small numbers never lies above it.
        """
        few, more = SHALLOW
        low, high = (
            self.plan(change, layers).fits(self.gpu, allocator=False).over for layers in SHALLOW
        )
        return low + (high - low) / (more - few) * ((self._layers or few) - few)

    def _over_at(self, size: int, shallow: bool = False) -> float:
        """The same for a number of examples per micro-batch."""
        change = {"batch_size": size * self.step.accumulation}
        return self._over_shallow(change) if shallow else self._over(change)

    def _surely_too_much(self, change: Change) -> bool:
        """True where a lower bound says that a change does not fit, without a plan of it."""
        if self._layers:
            return self._over_shallow(change) > 0
        if "accumulation" in change:
            without = {name: value for name, value in change.items() if name != "accumulation"}
            bound = least_peak(self.plan(without), change["accumulation"])
            return fit_on_gpu(self.gpu, bound, overhead=0).over > 0
        return False

    # -- which changes there are -------------------------------------------------------------------

    def _other_changes(self) -> list[Change]:
        """The changes of other fields than the accumulation, whether they fit or not."""
        step = self.step
        changes: list[Change] = []
        if step.precision in ("fp32", "tf32") and self.target == "cuda":
            changes.append({"precision": "bf16" if self.gpu.bf16 else "fp16"})
        if step.optimizer == "adamw":
            changes.append({"optimizer": "adamw8bit"})
        if not step.checkpointing:
            changes.append({"checkpointing": True})
        if step.lora_rank is None:
            changes.append({"lora_rank": 8})
        return changes

    def _accumulations(self) -> list[int]:
        """Numbers of micro-batches above the step's own, ascending."""
        numbers = range(self.step.accumulation + 1, self.step.batch_size + 1)
        return [number for number in numbers if self.step.batch_size % number == 0]

    def _smallest_accumulation(self, others: Change) -> Change:
        """The fewest micro-batches that fit together with other changes; {} if none do."""
        for number in self._accumulations():
            if self.fits({**others, "accumulation": number}):
                return {"accumulation": number}
        return {}

    def _several_changes(self) -> list[Change]:
        """One change of several fields that fits, or none; no field of it can be left out."""
        most: list[Change] = [{"accumulation": number} for number in self._accumulations()[-1:]]
        together: Change = {}
        for change in most + self._other_changes():
            if self._is_taken({**together, **change}):
                together |= change
                if self.fits(together):
                    break
        else:
            return []
        for name in list(together):  # one of the first changes may not be needed any more
            fewer = {other: value for other, value in together.items() if other != name}
            if self.fits(fewer):
                together = fewer
        if "accumulation" in together:
            others = {name: value for name, value in together.items() if name != "accumulation"}
            together |= self._smallest_accumulation(others)
        return [together]

    def _is_taken(self, change: Change) -> bool:
        """Whether the step can be changed so at all."""
        try:
            self.plan(change)
        except (ValueError, ModuleNotFoundError):
            return False
        return True


def least_peak(planned: Plan, accumulation: int) -> int:
    """A lower bound (bytes) of the peak of the same step with more micro-batches.

    It needs no plan. At the end of a forward pass the weights, the optimizer's states and the
    activations of one micro-batch are alive together. Activations that do not grow with the number
    of examples only add to the bound.
    """
    highest = planned.highest
    activations = highest["activations"] * planned.recipe.accumulation // accumulation
    return highest["parameters"] + highest["optimizer states"] + activations


def largest_that_fits(over: Callable[[int], float], start: int) -> int:
    """The largest whole number that fits; 0 if not even 1 does, at most LIMIT - 1.

    over   how far a number is beyond the limit; it fits if this is not positive. It is nearly a
           line: bytes grow with each example, and in jumps with the allocator's segments
    start  a first guess, at least 1; a good one needs two to four looks
    """
    search = _Search(over)
    search.bracket(min(start, LIMIT - 1))
    search.narrow()
    return search.low


class _Search:
    """`low` fits (or is 0), `high` does not (or is LIMIT); every look is between the two."""

    def __init__(self, over: Callable[[int], float]):
        self.over, self.low, self.high = over, 0, LIMIT
        self.seen: dict[int, float] = {}

    def look(self, number: int) -> bool:
        """Whether a number fits; it becomes the new `low` or `high`."""
        self.seen[number] = self.over(number)
        fits = self.seen[number] <= 0
        if fits:
            self.low = number
        else:
            self.high = number
        return fits

    def bracket(self, start: int) -> None:
        """Find a number that fits and one that does not, not far from each other."""
        upwards = self.look(start)
        direction = 1 if upwards else -1
        # A first guess that is right is known to be right after its neighbour.
        if self.high - self.low <= 1 or self.look(start + direction) != upwards:
            return
        # The line through the two says about where the limit is. Without one, double or halve.
        aim = self._crossing(*sorted((start, start + direction)))
        step = 1
        if aim is None:
            aim = 2 * start if upwards else start // 2
            step = max(1, abs(aim - start))
        guess = max(aim, self.low + 1) if upwards else min(aim, self.high - 1)
        while self.low < guess < self.high and self.look(guess) == upwards:
            guess += direction * step
            step *= 2

    def narrow(self) -> None:
        """Interpolate as long as this at least halves what is left; from then on, halve."""
        line_is_good = True
        while self.high - self.low > 1:
            width = self.high - self.low
            crossing = self._crossing(self.low, self.high) if line_is_good else None
            if crossing is None:
                self.look((self.low + self.high) // 2)
                continue
            guess = min(max(crossing, self.low + 1), self.high - 1)
            neighbour = guess + (1 if self.look(guess) else -1)
            if self.low < neighbour < self.high:
                self.look(neighbour)
            line_is_good = self.high - self.low <= width // 2

    def _crossing(self, first: int, second: int) -> int | None:
        """Where the line through two points reaches the limit, rounded down; None if nowhere."""
        if first not in self.seen or second not in self.seen:
            return None
        at_first, at_second = self.seen[first], self.seen[second]
        if at_second <= at_first:
            return None
        return int(first - at_first * (second - first) / (at_second - at_first))


def _plan_any(step: StepSettings, target: str) -> Plan:
    if isinstance(step, Recipe):
        return plan(step, target)
    assert isinstance(step, ModelStep)
    return plan_model_step(step, target)


def _layers_to_leave_out(step: StepSettings) -> int | None:
    """Number of layers of a model whose layers are all alike, so that some can be left out.

    None for a recipe, for models with few layers, and where something is said of single layers.
    """
    if not isinstance(step, ModelStep) or step.reads == "texts" or step.frozen is not None:
        return None
    layers = getattr(step.config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= 2 * SHALLOW[1]:
        return None
    values = step.config.to_dict().values()
    each_layer = any(isinstance(value, (list, dict)) and len(value) == layers for value in values)
    return None if each_layer else layers
