"""A plan of your own training step: any model, any loop, with or without a GPU.

You write what you would write for a GPU, in a function, and leave out `.cuda()`:

    def setup():
        model = MyModel().train()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # the default on a GPU
        batch = torch.zeros(32, 3, 224, 224)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):  # "cpu" here, "cuda" there
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()

        return [model, batch], step

    print(plan_custom_step(setup, mixed=True).occupied("T4"))

`setup` gives what lies on the GPU before the first step and the step. It is run on tensors without values, so the step must
not depend on any; nothing is computed and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

from helpers.gpus import GPU, cublas_workspace, find
from helpers.memory.allocator import AllocatorPeaks, CachingAllocator
from helpers.memory.tracker import (
    ACTIVATIONS,
    BORN,
    DIES,
    PARAMETERS,
    StorageTrace,
    Tracker,
    steady_memory,
)
from helpers.model_changes import as_if_real
from helpers.plan.cuda_kernels import CudaKernels
from helpers.plan.fake_tensors import FakeValues
from helpers.torch_private import FakeTensorMode
from helpers.units import GIB

MATMULS = {"mm", "addmm", "bmm", "baddbmm"}  # what calls cuBLAS


@dataclass(frozen=True)
class CustomStepPlan:
    """The last of a few steps, followed from the first on.

    peak   bytes of tensors at the peak of the last step
    story  every birth and death from before the first step on; the last step begins at event `last`
    """

    peak: int
    storage_trace: StorageTrace
    last: int

    def allocator_peaks(self, gpu: str | GPU) -> AllocatorPeaks:
        """What PyTorch's caching allocator makes of it: allocated and reserved peak of the last step, in bytes. Raises
        ValueError for an unknown card."""
        workspaces = [cublas_workspace(find(gpu) if isinstance(gpu, str) else gpu) // 2] * 2
        allocator, places = CachingAllocator(), {}
        for moment, (kind, storage, _, _) in enumerate(self.storage_trace.events):
            if moment == self.last:
                allocator.reset_peaks()
            if kind == BORN and (asked := self.storage_trace.bytes[storage]):
                while (
                    workspaces
                    and moment >= self.storage_trace.begin
                    and self.storage_trace.made_by[storage] in MATMULS
                ):
                    allocator.malloc(workspaces.pop())
                places[storage] = allocator.malloc(asked)
            elif kind == DIES and storage in places:
                allocator.free(places.pop(storage))
        return AllocatorPeaks(allocator.most_allocated, allocator.most_reserved)

    def __str__(self) -> str:
        return f"{self.peak / GIB:.2f} GiB of tensors at the peak"


def plan_custom_step(
    setup: Callable[[], tuple[Sequence[nn.Module | torch.Tensor], Callable[[], object]]],
    mixed: bool = False,
    fused_attention: bool = True,
    steps: int = 2,
) -> CustomStepPlan:
    """Plan the last of `steps` steps on a GPU; in the first one optimizers make their states.

    setup            gives (modules and tensors that are on the GPU before the first step, step)
    mixed            whether the step uses autocast: on a GPU it keeps other operations in fp32
    fused_attention  False where the card has no fused attention kernel for the type: bf16 on cards before Ampere
    Raises ValueError for a number of steps below 1, TypeError where setup gives something else.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be 1 or more.")
    precision = SimpleNamespace(precision="bf16" if mixed else "fp32")
    with (
        as_if_real(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeValues(),
        CudaKernels(precision, fused=fused_attention),
    ):
        made = setup()
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
            raise TypeError(
                "setup must return two things: a list of what is on the GPU, and the step, a function."
            )
        given, step = made
        tracker = Tracker()
        with steady_memory(), tracker:
            for thing in given:
                tracker.adopt(
                    _moved(thing) if isinstance(thing, nn.Module) else thing,
                    PARAMETERS if isinstance(thing, nn.Module) else ACTIVATIONS,
                )
            tracker.storage_trace.begin = len(tracker.storage_trace.events)
            for _ in range(steps):
                last = len(tracker.storage_trace.events)
                step()
    return CustomStepPlan(_peak(tracker.storage_trace, last), tracker.storage_trace, last)


def _moved(module: nn.Module) -> list[torch.Tensor]:
    """A module's tensors in the order in which `.to("cuda")` moves them: children first."""
    found = [tensor for child in module.children() for tensor in _moved(child)]
    own = [*module._parameters.values(), *module._buffers.values()]
    return found + [tensor for tensor in own if tensor is not None]


def _peak(storage_trace: StorageTrace, last: int) -> int:
    """Most bytes alive from event `last` on."""
    alive = peak = 0
    for moment, (kind, storage, _, _) in enumerate(storage_trace.events):
        alive += {BORN: 1, DIES: -1}.get(kind, 0) * storage_trace.bytes[storage]
        peak = alive if moment < last else max(peak, alive)
    return peak
