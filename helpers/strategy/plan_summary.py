"""The figures of a plan that a choice, a ladder or a table needs, and how they are written as JSON.

A plan holds every event of a step, some megabytes. Its summary holds a few numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from helpers.plan.planner import plan
from helpers.recipe import Recipe
from helpers.strategy.packed_trace import PackedTrace
from tight_fit.gpus import GPU
from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.step_seconds import Seconds, seconds
from tight_fit.kernels.trace_ops import TracedOps
from tight_fit.layouts.messages import SentMessage
from tight_fit.memory.plan import Fit, Plan, fit_on_gpu
from tight_fit.trace.tracker import OPTIMIZER


@dataclass(frozen=True)
class PlanSummary:
    """The plan of one optimizer step of one rank on a GPU, without its timeline.

    recipe          the step that was planned
    at_peak         {category: bytes} at the peak, as `Plan.at_peak`
    peak_phase      the phase that the peak falls in: "forward", "backward" or "optimizer"
    flops           {"forward", "recompute", "backward"}: FLOPs per optimizer step
    parameters      number of parameters of the whole model, trained or not
    overhead        bytes that the allocator needs beside the tensors, as `Plan.overhead`
    without_states  bytes at the peak if the optimizer's states were in another memory
    gradients       bytes of all gradients
    sent            what the rank sends per optimizer step, see `by_last_use`; empty for one rank
    packed          what a GPU runs in the step, for `seconds` and `step_time`; None where nothing
                    asks for the time (then it is planned when it is asked for, on one GPU only).
                    It does not count when two summaries are compared
    """

    recipe: Recipe
    at_peak: dict[str, int]
    peak_phase: str
    flops: dict[str, int]
    parameters: int
    overhead: int
    without_states: int
    gradients: int
    sent: tuple[SentMessage, ...] = ()
    packed: PackedTrace | None = field(default=None, compare=False, repr=False)

    @property
    def peak(self) -> int:
        """Bytes of tensors at the peak."""
        return sum(self.at_peak.values())

    def fits(self, gpu: str | GPU) -> Fit:
        """Whether the step fits a GPU, as `Plan.fits`. Raises ValueError for an unknown GPU."""
        return fit_on_gpu(gpu, self.peak, self.overhead)

    @property
    def operations(self) -> TracedOps:
        """What a GPU runs in the step, as `Plan.operations`.

        Raises ValueError for one rank of several that was kept without it.
        """
        if self.packed is not None:
            return self.packed.traced
        if self.sent:
            raise ValueError("This rank's plan was kept without its operations: run `make plans`.")
        operations = plan(self.recipe).operations
        assert operations is not None, "plans for a GPU are traced"
        return operations

    def seconds(self, gpu: str | GPU | GpuSpecs) -> Seconds:
        """How long the rank's own work takes, without messages, as `Plan.seconds`."""
        return seconds(self.operations, gpu)

    def to_dict(self) -> dict:
        """As in a file of plans: all fields but the recipe; equal messages once, with a count."""
        messages = Counter(self.sent)
        return {
            "at_peak": self.at_peak,
            "peak_phase": self.peak_phase,
            "flops": self.flops,
            "parameters": self.parameters,
            "overhead": self.overhead,
            "without_states": self.without_states,
            "gradients": self.gradients,
            "sent": [asdict(message) | {"count": messages[message]} for message in messages],
        } | ({"packed": list(self.packed.lines)} if self.packed else {})

    @classmethod
    def from_dict(cls, recipe: Recipe, values: dict) -> PlanSummary:
        """The reverse of `to_dict`."""
        sent: list[SentMessage] = []
        for group in values["sent"]:
            message = {name: value for name, value in group.items() if name != "count"}
            sent += [SentMessage(**message)] * group["count"]
        packed = PackedTrace(values["packed"]) if "packed" in values else None
        return cls(recipe, **values | {"packed": packed, "sent": tuple(sent)})


def summarize(
    recipe: Recipe, planned: Plan, sent: Sequence[SentMessage] = (), timed: bool = True
) -> PlanSummary:
    """The summary of a recipe's plan for a GPU.

    sent   the messages in the order of sending
    timed  keep what the time of the step is planned from
    """
    return PlanSummary(
        recipe,
        planned.at_peak,
        planned.peak_phase,
        dict(planned.flops),
        planned.parameters,
        planned.overhead,
        peak_without_states(planned),
        planned.highest["gradients"],
        by_last_use(sent),
        PackedTrace.of(planned.operations) if timed and planned.operations else None,
    )


def peak_without_states(plan: Plan) -> int:
    """Bytes at the peak of a step if the optimizer's states were in another memory."""
    return int((plan.timeline.sum(axis=1) - plan.timeline[:, OPTIMIZER]).max())


def by_last_use(sent: Sequence[SentMessage]) -> tuple[SentMessage, ...]:
    """The same messages, equal ones next to each other, in the order in which each is last sent.

    The operations have every message at its place.
    """
    counts = Counter(reversed(sent))
    return tuple(message for message in reversed(counts) for _ in range(counts[message]))
