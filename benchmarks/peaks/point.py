"""One published measurement: its figures, where they stand, and the step that was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tight_fit.gpus import GPU
from tight_fit.memory.allocator import AllocatorPeaks
from tight_fit.memory.plan import Plan
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model_step
from tight_fit.plans.own_step import CustomStepPlan, plan_custom_step
from tight_fit.units import GIB

Setup = Callable[[], tuple[list, Callable[[], object]]]

# Beside those that the package knows. Memory is not used by these plans; the compute capability is,
# as cuBLAS's workspace follows it.
OWN_GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A10", 24 * GIB, (8, 6)),
        GPU("RTX 2060", 8 * GIB, (7, 5)),
        GPU("RTX 3080 Ti Laptop", 16 * GIB, (8, 6)),
        GPU("RTX 4070 Ti SUPER", 16 * GIB, (8, 9)),
        GPU("L40S", 45 * GIB, (8, 9)),
    )
}


@dataclass(frozen=True)
class Point:
    """A measured step.

    name       of model and step, unique among all points
    source     address, with the commit where it has one
    release    PyTorch's release as published ("2.6.0"); "" where the source does not say
    setup      makes the step, for `plan_custom_step`; or the step of a known model
    allocated  `torch.cuda.max_memory_allocated` in bytes; None where it was not published
    reserved   the same of `torch.cuda.max_memory_reserved`
    steps      steps until the figure was read; None for many
    behaves    the release of `plan_custom_step(torch_version=...)`; None for one that plans like
               the installed PyTorch
    ranks      ranks of DistributedDataParallel; None without it
    tokens_per_second  as published; None where it was not
    parameters         of the model; None where it was not published
    own_error  that torch-preflight publishes of its own estimate (reserved memory and CUDA context
               together); None for other sources
    """

    name: str
    source: str
    release: str
    gpu: GPU
    setup: Setup | ModelStep
    allocated: float | None = None
    reserved: float | None = None
    steps: int | None = None
    behaves: str | None = None
    ranks: int | None = None
    tokens_per_second: float | None = None
    parameters: int | None = None
    own_error: float | None = None

    def plan(self) -> CustomStepPlan | Plan:
        """The plan of the step for its GPU."""
        if isinstance(self.setup, ModelStep):
            return plan_model_step(self.setup.on(self.gpu.capability))
        return plan_custom_step(
            self.setup,
            flash=self.gpu.bf16,
            steps=self.steps,
            torch_version=self.behaves,
            ranks=self.ranks,
        )

    def planned(self) -> AllocatorPeaks:
        """The peaks of the step by its plan."""
        return self.plan().allocator_peaks(self.gpu)
