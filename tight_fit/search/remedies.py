"""What would fit: the smallest changes of a step that a GPU holds, and the largest batch.

One set of rules serves the step of any model (`ModelStep`) and a `Recipe`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tight_fit.gpus import GPU, WORKSPACE, as_gpu, device_of
from tight_fit.gpus.specs import check_fp8, has_arithmetic, speed_of
from tight_fit.memory.plan import Plan, fit_on_gpu
from tight_fit.models.config import LANGUAGE_MODELS, text_config
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import ADAMW
from tight_fit.plans.batch_line import BatchLines, TraceStore
from tight_fit.search.largest import largest_that_fits
from tight_fit.techniques.references import MODEL, PRECOMPUTED
from tight_fit.techniques.settings import StepSettings
from tight_fit.trace.storage_trace import CATEGORIES, OPTIMIZER, PARAMETERS, PHASES

Change = dict[str, Any]  # {field of the step: new value}

CHANGED = (
    "precision loss reference optimizer checkpointing lora_rank base weights offload accumulation "
    "batch_size"
).split()
RANK = 8  # of adapters, where none were asked for


class Remedies:
    """Plans around one step for one GPU; each is made once.

    `changes()` are the changes of the step that fit, `largest_batch()` its largest batch size.

    >>> from tight_fit import ModelStep, Remedies
    >>> step = ModelStep.of("distilroberta-base", batch_size=256, length=128)
    >>> around = Remedies(step, "RTX 3060")
    >>> around.changes()[0], around.largest_batch()
    ({'accumulation': 2}, 250)

    step      a `ModelStep`, or another one, of which `planning(step, device)` makes a plan
    tracing   is called with what each traced step changes, before it is traced
    kept      traces of the model's steps that were made before
    """

    def __init__(
        self,
        step: StepSettings,
        gpu: str | GPU,
        tracing: Callable[[Change], object] = lambda change: None,
        planning: Callable[[Any, str], Plan] | None = None,
        kept: TraceStore | None = None,
    ):
        self.gpu = gpu = as_gpu(gpu)
        check_fp8(step.float8, gpu)
        self.step: Any = step.on(gpu.capability) if isinstance(step, ModelStep) else step
        self.device = device_of(gpu)
        self.planning = planning
        self.lines = BatchLines(self.device, lambda traced: tracing(self._difference(traced)), kept)
        self._plans: dict[tuple, Plan] = {}
        self._reserved: dict[tuple, int] = {}

    def for_gpu(self, gpu: GPU) -> Remedies:
        """The same for another GPU; plans are shared where they are for the same device."""
        other = Remedies(self.step, gpu, planning=self.planning, kept=self.lines.kept)
        if other.device == self.device:
            other.lines = self.lines
            if other.step == self.step:  # else attention takes other kernels
                other._plans, other._reserved = self._plans, self._reserved
        return other

    def _difference(self, step: ModelStep) -> Change:
        return {
            name: getattr(step, name)
            for name in CHANGED
            if getattr(step, name) != getattr(self.step, name)
        }

    def plan(self, change: Change | None = None, traced: bool = False) -> Plan:
        """The plan of the step with a change.

        traced  True: from a trace of its own, not on a line through others (`BatchLines`)
        Raises ValueError or TypeError where the step does not take the change, and
        ModuleNotFoundError where a library that it needs is not installed.
        """
        key = self._key(change)
        if key not in self._plans or traced:
            step = replace(self.step, **(change or {}))
            if isinstance(step, ModelStep):
                self._plans[key] = self.lines.traced(step) if traced else self.lines.plan(step)
            else:
                if self.planning is None:
                    raise TypeError(
                        f"step is no ModelStep but a {type(step).__name__}: give `planning` as "
                        "well, a function that plans it."
                    )
                self._plans[key] = self.planning(step, self.device)
        return self._plans[key]

    def _key(self, change: Change | None) -> tuple:
        different = {
            name: value
            for name, value in (change or {}).items()
            if value != getattr(self.step, name)
        }
        return tuple(sorted(different.items()))

    @property
    def planned(self) -> int:
        """How many whole plans have been made so far."""
        return self.lines.made if isinstance(self.step, ModelStep) else len(self._plans)

    def fits(self, change: Change) -> bool:
        """Whether the GPU holds the step with a change; False where the step does not take it."""
        try:
            return not self._surely_too_much(change) and self._over(change) <= 0
        except (ValueError, ModuleNotFoundError):
            return False

    def changes(self) -> list[Change]:
        """The changes of the step that fit, in the order of what they ask of the training.

        These are single changes: the smallest accumulation, half precision, a loss in chunks, a
        reference computed before, 8-bit AdamW, checkpointing, LoRA, bf16 weights, LoRA beside
        weights in 4 bits, and offloading.
        Where none of them suffices alone, the list holds one change of several fields, none of
        which can be left out. It is empty if nothing fits or nothing is needed.
        Raises what `plan` raises for the step as it is.
        """
        self.plan()
        if self.fits({}):
            return []
        as_asked = self.runnable({})
        single = [as_asked] if as_asked and self.fits(as_asked) else []
        fewer = self._smallest_accumulation(as_asked)
        single += [as_asked | fewer] if fewer else []
        single += [change for change in self._other_changes() if self.fits(change)]
        return single or self._several_changes()

    def largest_batch(self) -> int | None:
        """Examples per optimizer step of the largest batch that fits, with all else as it is.

        It is a multiple of the accumulation; the next multiple does not fit. None where not even
        one example per micro-batch fits.
        """
        if self._surely_too_much({"batch_size": self.step.accumulation}):
            return None
        most = largest_that_fits(self._over_at, self.step.micro_batch)
        if most and not self._confirmed({"batch_size": most * self.step.accumulation}):
            most = largest_that_fits(self._over_at, self.step.micro_batch)
        return most * self.step.accumulation or None

    # -- does it fit? ------------------------------------------------------------------------------

    def _over(self, change: Change) -> float:
        """Bytes beyond the GPU's memory, negative where there is room.

        The allocator's overhead counts only where the rest leaves room for it, and exactly only
        where the step would not fit with all that the allocator reserves without a limit: to
        simulate it takes time.
        """
        planned = self.plan(change)
        over: float = planned.fits(self.gpu, allocator=False).over
        if over > 0 or self.device != "cuda":
            return over if over > 0 else planned.fits(self.gpu).over
        key = self._key(change)
        if key not in self._reserved:
            self._reserved[key] = planned.allocation_trace.unlimited.reserved
        overhead = self._reserved[key] - planned.peak - 2 * WORKSPACE
        at_most = fit_on_gpu(self.gpu, planned.peak, overhead).over
        if at_most <= 0:
            return at_most
        limit = self._reserved[key] - int(at_most)
        return planned.allocation_trace.beside(limit) - limit

    def _confirmed(self, change: Change) -> bool:
        """Whether a trace of the step with a change gives the plan that it was said to have.

        Where it does not, nothing is read off a line any more.
        """
        step = replace(self.step, **change)
        if not isinstance(step, ModelStep) or self.lines.checked(step):
            return True
        expected = self.plan(change).peak
        if self.plan(change, traced=True).peak == expected:
            return True
        self._plans.clear()
        self._reserved.clear()
        return False

    def _over_at(self, size: int) -> float:
        """The same for a number of examples per micro-batch."""
        return self._over({"batch_size": size * self.step.accumulation})

    def _surely_too_much(self, change: Change) -> bool:
        """True where a lower bound says that a change does not fit, without a plan of it."""
        if not change:
            return False
        bound = self._least_with(change)
        if "accumulation" in change:
            without = {name: value for name, value in change.items() if name != "accumulation"}
            if without == {} or self._key(without) in self._plans:
                bound = max(bound, least_peak(self.plan(without), change["accumulation"]))
        if "loss" in change and isinstance(self.step, ModelStep):
            without = {name: value for name, value in change.items() if name != "loss"}
            if without and self._key(without) in self._plans:
                bound = max(bound, least_in_chunks(self.plan(without)))
        return fit_on_gpu(self.gpu, bound, overhead=0).over > 0

    def _least_with(self, change: Change) -> int:
        """Bytes that a step takes at least after a change: what the change leaves as it is."""
        planned = self.plan()
        if set(change) == {"optimizer"}:  # the states alone change
            before = planned.phases < PHASES.index("optimizer")
            rest = planned.timeline.sum(axis=1) - planned.timeline[:, OPTIMIZER]
            return int(rest[before].max())
        highest = planned.highest
        if "base" in change:
            return 0
        bound = highest[CATEGORIES[PARAMETERS]]
        if _holds_reference(self.step) and ("reference" in change or "lora_rank" in change):
            bound //= 2  # the reference is no larger than the model that it is compared with
        if "lora_rank" not in change:
            bound += highest["gradients"]
            on_host = change.get("offload") == "optimizer"
            bound += 0 if on_host or "optimizer" in change else highest["optimizer states"]
        return bound // 2 if "weights" in change else bound

    # -- which changes there are -------------------------------------------------------------------

    def _other_changes(self) -> list[Change]:
        """The changes of other fields than the accumulation, whether they fit or not."""
        step = self.step
        changes: list[Change] = []
        if step.precision in ("fp32", "tf32") and self.device == "cuda" and self.half != "fp32":
            changes.append({"precision": self.half})
        if getattr(step, "loss", None) == "full" and step.task in LANGUAGE_MODELS:
            changes.append({"loss": "chunked"})
        if _holds_reference(step) and step.task == "dpo":
            changes.append({"reference": PRECOMPUTED})
        if step.optimizer in ADAMW:
            lighter = ("adamw", "adamw8bit")  # fused makes no copies
            changes += [{"optimizer": name} for name in lighter if name != step.optimizer]
        if not step.checkpointing:
            changes.append({"checkpointing": True})
        if step.lora_rank is None:
            changes.append({"lora_rank": RANK})
        if getattr(step, "weights", None) == "fp32" and self.gpu.bf16 and self.device == "cuda":
            half = step.precision in ("fp32", "tf32")  # then the command takes autocast as well
            changes.append({"weights": "bf16", **({"precision": "bf16"} if half else {})})
        changes += self.four_bits()
        if step.offload is None and self.device == "cuda" and isinstance(step, ModelStep):
            changes += [{"offload": "optimizer"}, {"offload": "activations"}]
        return [self.runnable(change) for change in changes]

    @property
    def half(self) -> str:
        """The 16-bit precision of the GPU; fp32 where it multiplies in no other."""
        return "bf16" if self.gpu.bf16 else "fp16" if self._has("fp16") else "fp32"

    def _has(self, precision: str) -> bool:
        """Whether the GPU has an arithmetic, as far as that is known."""
        return speed_of(self.gpu.name) is None or has_arithmetic(precision, self.gpu)

    def runnable(self, change: Change) -> Change:
        """A change with fp16, or fp32, in place of bf16 where the GPU has no bf16.

        Weights in fp16 cannot be trained: those that train become fp32.
        """
        step, asked = self.step, {"precision": self.step.precision}
        if isinstance(step, ModelStep):
            asked["weights"] = step.weights or "fp32"
        after = asked | {name: value for name, value in change.items() if name in asked}
        if self.gpu.bf16 or self.device != "cuda" or "bf16" not in after.values():
            return change
        trained = (change.get("lora_rank") or step.lora_rank) is None
        instead: Change = {"precision": self.half}
        if "weights" in asked:
            instead["weights"] = "fp32" if trained else self.half
        return change | instead

    def four_bits(self) -> list[Change]:
        """The change to weights in 4 bits with adapters beside them; [] where there is none."""
        step = self.step
        if not isinstance(step, ModelStep) or step.base == "nf4":
            return []
        if step.task not in LANGUAGE_MODELS:
            return []
        change: Change = {"base": "nf4"}
        if step.lora_rank is None:
            change["lora_rank"] = RANK
        if step.weights == "fp32":  # what is not quantized, and the products
            change |= {"weights": self.half, "precision": self.half}
        return [change]

    def _accumulations(self) -> list[int]:
        """Numbers of micro-batches above the step's own, ascending."""
        numbers = range(self.step.accumulation + 1, self.step.batch_size + 1)
        return [number for number in numbers if self.step.batch_size % number == 0]

    def _smallest_accumulation(self, others: Change) -> Change:
        """The fewest micro-batches that fit together with other changes; {} if none do."""
        for number in self._accumulations():
            change = {**others, "accumulation": number}
            if self.fits(change) and (self._confirmed(change) or self.fits(change)):
                return {"accumulation": number}
        return {}

    def _several_changes(self) -> list[Change]:
        """One change of several fields that fits, or none; no field of it can be left out."""
        together = self._first_that_fits(proven=False)
        if together is None:
            together = self._first_that_fits(proven=True)
        if not together:
            return []
        for name in list(together):  # one of the first changes may not be needed any more
            if name == "precision" and "weights" in together:
                continue
            fewer = {other: value for other, value in together.items() if other != name}
            fewer = self.runnable(fewer)
            if fewer != together and self.fits(fewer):
                together = fewer
        if "accumulation" in together:
            others = {name: value for name, value in together.items() if name != "accumulation"}
            together |= self._smallest_accumulation(others)
        return [together]

    def _first_that_fits(self, proven: bool) -> Change | None:
        """The changes one after the other until they fit together; {} where they never do.

        proven  whether the step takes a change is found by a plan. Else that is taken for granted
                while a bound says that it cannot fit, and None tells that it was wrong to
        """
        most: list[Change] = [{"accumulation": number} for number in self._accumulations()[-1:]]
        together: Change = {}
        granted = False
        for change in most + self._other_changes():
            more = self.runnable({**together, **change})
            try:
                replace(self.step, **more)
                skipped = not proven and self._surely_too_much(more)
                if not skipped:
                    self.plan(more)
            except (ValueError, ModuleNotFoundError):
                if granted:
                    return None
                continue
            granted |= skipped
            together = more
            if not skipped and self.fits(together):
                return together
        return {}


def _holds_reference(step: StepSettings) -> bool:
    """Whether a second model is in memory, that of dpo or grpo."""
    return getattr(step, "compared_with", None) == MODEL


def least_peak(planned: Plan, accumulation: int) -> int:
    """A lower bound (bytes) of the peak of the same step with more micro-batches.

    It needs no plan. At the end of a forward pass the weights, the optimizer's states and the
    activations of one micro-batch are alive together. Activations that do not grow with the number
    of examples only add to the bound.
    """
    highest = planned.highest
    activations = highest["activations"] * planned.recipe.accumulation // accumulation
    return highest["parameters"] + highest["optimizer states"] + activations


def least_in_chunks(planned: Plan) -> int:
    """A lower bound (bytes) of the peak of the same step of a `ModelStep` with its loss in chunks.

    It needs no plan. Both steps run the same operations until the logits are made, before which
    nothing of their size is. It is 0 for tasks that compare texts, and with what changes layers.
    """
    step: Any = planned.recipe
    if step.task != "causal-lm" or step.compile or step.float8 is not None:
        return 0
    words = text_config(step.config).vocab_size
    logits = 2 * step.micro_batch * step.tokens * words  # in 16 bits at least
    alive = planned.timeline.sum(axis=1)
    made = np.flatnonzero(np.diff(alive) >= logits)
    return int(alive[: made[0] + 1].max()) if len(made) else 0
