"""The plan against real GPUs: peaks that others measured and published to the byte, planned here.

They are torch-preflight's on a T4 and optimum-benchmark's on an A10 (`benchmarks.peaks.known`),
with what two other estimators say of them. `benchmarks.peaks` plans them with all other peaks.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.commands.estimate import estimate_training_usage

from benchmarks.peaks.point import Point
from benchmarks.peaks.points import POINTS
from helpers.tables import Table
from tight_fit.memory.allocator import AllocatorPeaks
from tight_fit.plans.own_step import CustomStepPlan
from tight_fit.units import size

STEPS = tuple(point for point in POINTS if point.parameters is not None)


def table(planned: Sequence[tuple[Point, CustomStepPlan, AllocatorPeaks]]) -> Table:
    """A row per step: both peaks measured and planned, and what two other estimators miss by."""
    rows = []
    for step, plan, peaks in planned:
        precision = "float16" if step.gpu.name == "T4" else "float32"
        weights, error = 4 * step.parameters, step.own_error
        accelerate = max(estimate_training_usage(weights, precision).values())
        allocated = size(peaks.allocated)
        if step.allocated:
            allocated += f" ({off(peaks.allocated, step.allocated)})"
        rows.append(
            {
                "step": step.name,
                "GPU": step.gpu.name,
                "allocated": size(step.allocated) if step.allocated else "not seen",
                "planned": allocated,
                "its tensors alone": off(plan.peak, step.allocated),
                "reserved": size(step.reserved),
                "reserved, planned": f"{size(peaks.reserved)} "
                f"({off(peaks.reserved, step.reserved)})",
                "torch-preflight": "-" if error is None else f"{error:+.1%}",
                "accelerate estimate-memory": off(accelerate, step.allocated),
            }
        )
    return Table(rows)


def allocator_peaks(step: Point) -> tuple[CustomStepPlan, AllocatorPeaks]:
    """(the plan of the step, the peaks of the allocator on its GPU by that plan)."""
    plan = step.plan()
    return plan, plan.allocator_peaks(step.gpu)


def off(estimate: float, truth: float | None) -> str:
    """By how much an estimate is off, as a percentage; "-" where the truth is not known."""
    return f"{estimate / truth - 1:+.2%}" if truth else "-"
