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

    print(plan_custom_step(setup, mixed=True).allocator_peaks("T4"))

`setup` returns what is on the GPU before the first step, and the step. Both are run on fake
tensors, which have no values, so the step must not depend on any; nothing is computed or allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from helpers.recipe import Recipe
from helpers.timing.specs import GpuSpecs
from helpers.timing.step_seconds import Seconds, seconds
from helpers.timing.trace_ops import Recorder, TracedOps
from helpers.torch_private import FakeTensorMode
from helpers.units import GIB

OnGPU = Sequence[nn.Module | torch.Tensor]
MATMULS = {"mm", "addmm", "bmm", "baddbmm"}  # the operations that call cuBLAS


@dataclass(frozen=True)
class CustomStepPlan:
    """The plan of the last of a few steps, which are followed from the first one on.

    peak           bytes of tensors at the peak of the last step
    storage_trace  every birth and death from before the first step on
    last           index of the event with which the last step begins
    operations     what a GPU runs in the last step, for `seconds`
    """

    peak: int
    storage_trace: StorageTrace
    last: int
    operations: TracedOps

    def allocator_peaks(self, gpu: str | GPU) -> AllocatorPeaks:
        """The last step's allocated and reserved peak (bytes) in PyTorch's CUDA allocator.

        cuBLAS's two workspaces are allocated with the first two matrix products. Raises ValueError
        for an unknown GPU.
        """
        gpu = find(gpu) if isinstance(gpu, str) else gpu
        workspaces = [cublas_workspace(gpu) // 2] * 2
        trace, allocator = self.storage_trace, CachingAllocator()
        addresses: dict[int, int] = {}  # storage -> address
        for event, (kind, storage, _, _) in enumerate(trace.events):
            if event == self.last:
                allocator.reset_peaks()
            if kind == BORN and trace.bytes[storage]:
                if event >= trace.begin and trace.made_by[storage] in MATMULS:
                    while workspaces:
                        allocator.malloc(workspaces.pop())
                addresses[storage] = allocator.malloc(trace.bytes[storage])
            elif kind == DIES and storage in addresses:
                allocator.free(addresses.pop(storage))
        return AllocatorPeaks(allocator.most_allocated, allocator.most_reserved)

    def seconds(self, gpu: str | GPU | GpuSpecs) -> Seconds:
        """How long the last step takes on a GPU (`Plan.seconds`), fp32 products without TF32.

        What runs without gradients after a backward pass counts as the optimizer's. Raises
        ValueError for an unknown GPU, and one without an arithmetic that the step uses.
        """
        return seconds(self.operations, gpu)

    def __str__(self) -> str:
        return f"{self.peak / GIB:.2f} GiB of tensors at the peak"


def plan_custom_step(
    setup: Callable[[], tuple[OnGPU, Callable[[], object]]],
    mixed: bool = False,
    fused_attention: bool = True,
    steps: int = 2,
) -> CustomStepPlan:
    """Plan the last of `steps` steps on a GPU; in the first one optimizers make their states.

    setup            returns (modules and tensors that are on the GPU before the first step, step)
    mixed            whether the step uses autocast: on a GPU it keeps other operations in fp32
    fused_attention  False where the GPU has no fused attention kernel for the dtype: bf16 on GPUs
                     before Ampere
    Raises ValueError for a number of steps below 1, TypeError where setup returns something else.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be 1 or more.")
    precision = Recipe(precision="bf16" if mixed else "fp32")
    with (
        as_if_real(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeValues(),
        CudaKernels(precision, fused=fused_attention),
    ):
        on_gpu, step = _checked(setup())
        tracker, recorder = Tracker(), Recorder(automatic=True)
        with steady_memory(), tracker:
            for item in on_gpu:
                if isinstance(item, nn.Module):
                    tracker.adopt(_tensors_as_moved(item), PARAMETERS)
                else:
                    tracker.adopt(item, ACTIVATIONS)
            tracker.storage_trace.begin = len(tracker.storage_trace.events)
            for number in range(steps):
                if number == steps - 1:
                    tracker.recorder = recorder
                last = len(tracker.storage_trace.events)
                step()
    trace = tracker.storage_trace
    return CustomStepPlan(_peak(trace, last), trace, last, recorder.traced)


def _checked(returned: object) -> tuple[OnGPU, Callable[[], object]]:
    if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
        raise TypeError(
            "setup must return two things: a list of what is on the GPU, and the step, a function."
        )
    return returned


def _tensors_as_moved(module: nn.Module) -> list[torch.Tensor]:
    """A module's tensors in the order in which `.to("cuda")` moves them: children first."""
    tensors = [tensor for child in module.children() for tensor in _tensors_as_moved(child)]
    own = [*module._parameters.values(), *module._buffers.values()]
    return tensors + [tensor for tensor in own if tensor is not None]


def _peak(storage_trace: StorageTrace, last: int) -> int:
    """Most bytes alive after any event from `last` on."""
    alive = peak = 0
    for event, (kind, storage, _, _) in enumerate(storage_trace.events):
        alive += {BORN: 1, DIES: -1}.get(kind, 0) * storage_trace.bytes[storage]
        peak = alive if event < last else max(peak, alive)
    return peak
