"""The figures of a plan that a ladder or a table needs, and how they are written as JSON.

A plan holds every event of a step, some megabytes. Its summary holds a few numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from helpers.plan.packed_trace import PackedTrace
from helpers.recipe import Recipe
from tight_fit.gpus import GPU
from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.step_seconds import Seconds, seconds
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.memory.plan import Fit, Plan, fit_on_gpu


@dataclass(frozen=True)
class PlanSummary:
    """The plan of one optimizer step on a GPU, without its timeline.

    recipe      the step that was planned
    at_peak     {category: bytes} at the peak, as `Plan.at_peak`
    peak_phase  the phase that the peak falls in: "forward", "backward" or "optimizer"
    flops       {"forward", "recompute", "backward"}: FLOPs per optimizer step
    parameters  number of parameters of the whole model, trained or not
    overhead    bytes that the allocator needs beside the tensors, as `Plan.overhead`
    packed      what a GPU runs in the step, for `seconds`. It does not count when two summaries are
                compared
    """

    recipe: Recipe
    at_peak: dict[str, int]
    peak_phase: str
    flops: dict[str, int]
    parameters: int
    overhead: int
    packed: PackedTrace = field(compare=False, repr=False)

    @property
    def peak(self) -> int:
        """Bytes of tensors at the peak."""
        return sum(self.at_peak.values())

    def fits(self, gpu: str | GPU) -> Fit:
        """Whether the step fits a GPU, as `Plan.fits`. Raises ValueError for an unknown GPU."""
        return fit_on_gpu(gpu, self.peak, self.overhead)

    @property
    def operations(self) -> TracedOps:
        """What a GPU runs in the step, as `Plan.operations`."""
        return self.packed.traced

    def seconds(self, gpu: str | GPU | GpuSpecs) -> Seconds:
        """How long the step takes, as `Plan.seconds`."""
        return seconds(self.operations, gpu)

    def to_dict(self) -> dict:
        """As in a file of plans: all fields but the recipe."""
        values = {name: value for name, value in vars(self).items() if name != "recipe"}
        return values | {"packed": list(self.packed.lines)}

    @classmethod
    def from_dict(cls, recipe: Recipe, values: dict) -> PlanSummary:
        """The reverse of `to_dict`."""
        return cls(recipe, **values | {"packed": PackedTrace(values["packed"])})


def summarize(recipe: Recipe, planned: Plan) -> PlanSummary:
    """The summary of a recipe's plan for a GPU."""
    assert planned.operations is not None, "plans for a GPU are traced"
    return PlanSummary(
        recipe,
        planned.at_peak,
        planned.peak_phase,
        dict(planned.flops),
        planned.parameters,
        planned.overhead,
        PackedTrace.of(planned.operations),
    )
