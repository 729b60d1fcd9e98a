"""What a record keeps of the plan of its run."""

from __future__ import annotations

import torch

from helpers.plan.planner import plan
from helpers.recipe import Recipe
from tight_fit import gpus
from tight_fit.gpus.specs import of_device
from tight_fit.memory.plan import Plan


def for_record(recipe: Recipe, device: str) -> dict:
    """`Run.plan` of a recipe that runs on "cuda" or "cpu"."""
    planned = plan(recipe, torch.device(device).type)
    values = {
        "target": planned.device,
        "peak": planned.peak,
        "at_peak": planned.at_peak,
        "flops": planned.flops,
    }
    if planned.device == "cuda":
        peaks = planned.allocator_peaks(gpus.here())
        values |= {"allocated": peaks.allocated, "reserved": peaks.reserved}
        values["seconds"] = seconds_on(planned, gpus.here().name)
    return values


def seconds_on(planned: Plan, device: str) -> float | None:
    """Seconds of a planned step on the GPU that the driver names so.

    None where it is not known, or has not the arithmetic of the step: frozen weights in bf16 or NF4
    are multiplied in bf16 under precision="fp32", which a T4 does by other means.
    """
    gpu = of_device(device)
    if gpu is None:
        return None
    try:
        return planned.seconds(gpu).total
    except ValueError:  # "has no bf16 arithmetic", of a product inside the step
        return None
