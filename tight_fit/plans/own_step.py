"""A plan of your own training step: any model, any loop, with or without a GPU.

You write what you would write for a GPU, in a function:

    def setup():
        model = MyModel().cuda().train()
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.zeros(32, 3, 224, 224, device="cuda")

        def step():
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()

        return [model, batch], step

    print(plan_custom_step(setup).allocator_peaks("T4"))

`setup` returns what is on the GPU before the first step, and the step. Both are run on fake
tensors, which have no values, so the step must not depend on any; nothing is computed or allocated.

Where the set-up or the step names CUDA as a device, only what is on the GPU counts: what was moved
there, made there, or computed from such. Where neither does, everything counts, and "cpu" may stand
wherever "cuda" would.

DistributedDataParallel is planned for one of `ranks` ranks, with its buckets
(`tight_fit.trace.data_parallel`), layers of bitsandbytes with 4 and 8 bits by
`tight_fit.trace.quantized`, and what older releases of PyTorch do by `tight_fit.trace.releases`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from tight_fit.checks import function, true_or_false, whole
from tight_fit.gpus import GPU, WORKSPACE, as_gpu, cublas_workspace
from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.step_seconds import Seconds, seconds
from tight_fit.kernels.trace_ops import Recorder
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.memory.allocator import (
    MAX_STEPS,
    ROUND,
    AllocatorPeaks,
    CachingAllocator,
    CapacityExceeded,
)
from tight_fit.memory.plan import Fit, fit_on_gpu
from tight_fit.techniques.model_changes import as_if_real
from tight_fit.torch_private import storage_key, tree_leaves
from tight_fit.trace.cublas import PRODUCTS
from tight_fit.trace.data_parallel import data_parallel
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues
from tight_fit.trace.gpu_calls import GPUCalls, Places, as_on_gpu
from tight_fit.trace.quantized import quantize, quantized_layers, state_tensors
from tight_fit.trace.releases import as_in, parse
from tight_fit.trace.storage_trace import ACTIVATIONS, BORN, DIES, PARAMETERS, StorageTrace
from tight_fit.trace.tracker import Tracker, steady_memory
from tight_fit.units import GIB

OnGPU = Sequence[nn.Module | torch.Tensor]


@dataclass(frozen=True)
class CustomStepPlan:
    """The plan of the last of a few steps, which are followed from the first one on.

    peak           bytes of tensors at the peak of the last step
    storage_trace  every birth and death from before the first step on
    last           index of the event with which the last step begins
    operations     what a GPU runs in the last step, for `seconds`
    release        (major, minor) of the PyTorch that is planned
    """

    peak: int
    storage_trace: StorageTrace
    last: int
    operations: TracedOps
    release: tuple[int, int]

    def allocator_peaks(self, gpu: str | GPU) -> AllocatorPeaks:
        """The last step's allocated and reserved peak (bytes) in PyTorch's CUDA allocator.

        cuBLAS's two workspaces are allocated with the first two matrix products. Raises ValueError
        for an unknown GPU.
        """
        gpu = as_gpu(gpu)
        replay = Replay(cublas_workspace(gpu) // 2 if self.release >= (2, 0) else 0)
        replay.run(self.storage_trace, self.last)
        return replay.run(self.storage_trace, len(self.storage_trace.events))

    def fits(self, gpu: str | GPU) -> Fit:
        """Whether all of the steps fit a GPU, with every term that decides it (bytes).

        Raises ValueError for an unknown GPU.
        """
        peak = peak_of(self.storage_trace, 0)
        return fit_on_gpu(gpu, peak, least(self.storage_trace) - peak - 2 * WORKSPACE)

    def seconds(self, gpu: str | GPU | GpuSpecs) -> Seconds:
        """How long the last step takes on a GPU (`Plan.seconds`), fp32 products without TF32.

        What runs without gradients after a backward pass counts as the optimizer's. Raises
        ValueError for an unknown GPU, and one without an arithmetic that the step uses.
        """
        return seconds(self.operations, gpu)

    def __str__(self) -> str:
        return f"{self.peak / GIB:.2f} GiB of tensors at the peak"


class Replay:
    """The allocator during the events of a trace.

    workspace  bytes of each of cuBLAS's two workspaces, 0 for none
    capacity   bytes that the allocator may reserve, None for no limit
    """

    def __init__(self, workspace: int, capacity: int | None = None):
        self.allocator = CachingAllocator(capacity)
        self.workspaces = [workspace] * 2 if workspace else []
        self.addresses: dict[int, int] = {}  # storage -> address
        self.done = 0  # events

    def run(self, trace: StorageTrace, end: int) -> AllocatorPeaks:
        """The peaks from where the last call ended up to an event, that one left out.

        Raises allocator.CapacityExceeded where the capacity does not suffice.
        """
        self.allocator.reset_peaks()
        for event in range(self.done, end):
            kind, storage, _, _ = trace.events[event]
            if kind == BORN and trace.bytes[storage]:
                if event >= trace.begin and trace.made_by[storage] in PRODUCTS:
                    while self.workspaces:
                        self.allocator.malloc(self.workspaces.pop())
                self.addresses[storage] = self.allocator.malloc(trace.bytes[storage])
            elif kind == DIES and storage in self.addresses:
                self.allocator.free(self.addresses.pop(storage))
        self.done = end
        return AllocatorPeaks(self.allocator.most_allocated, self.allocator.most_reserved)


class GPUTracker(Tracker):
    """A tracker that knows which of its storages are not on the GPU."""

    def __init__(self, places: Places):
        super().__init__(on_gpu=True)
        self.places = places
        self.host: set[int] = set()  # storages

    def adopt_rest(self) -> None:
        """Count what else is on the GPU already."""
        for storage in self.places.storages_on_gpu():
            if storage_key(storage) not in self._alive:
                self._born(storage, ACTIVATIONS, "given")

    def _born(self, storage: torch.UntypedStorage, category: int, made_by: str) -> None:
        if not self.places.on_gpu(storage):
            self.host.add(len(self.storage_trace.bytes))
        super()._born(storage, category, made_by)

    def counted(self, marks: Sequence[int]) -> tuple[StorageTrace, list[int]]:
        """(the trace as far as it counts, numbers of events as numbers of events that count)."""
        trace = self.storage_trace
        host = self.host if self.places.named else set()
        counts = [event[1] not in host for event in trace.events]
        events = [event for event, count in zip(trace.events, counts) if count]
        begin, *marks = (sum(counts[:mark]) for mark in (trace.begin, *marks))
        return replace(trace, events=events, begin=begin), marks


def plan_custom_step(
    setup: Callable[[], tuple[OnGPU, Callable[[], object]]],
    mixed: bool = False,
    flash: bool = True,
    steps: int | None = None,
    torch_version: str | None = None,
    ranks: int | None = None,
) -> CustomStepPlan:
    """Plan the last of `steps` steps on a GPU; in the first one optimizers make their states.

    >>> import torch
    >>> from tight_fit import plan_custom_step
    >>> def setup():
    ...     model = torch.nn.Linear(4096, 4096).cuda()
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     batch = torch.zeros(512, 4096, device="cuda")
    ...     def step():
    ...         optimizer.zero_grad()
    ...         model(batch).square().mean().backward()
    ...         optimizer.step()
    ...     return [model, batch], step
    >>> print(plan_custom_step(setup).fits("T4"))
    needs 0.8 GiB, the T4 has 14.6 GiB: 13.7 GiB to spare

    By default steps go on until one reserves nothing new, as in a long run: where states are made
    between freed activations, the third step may reserve more than the second
    (benchmarks/peaks has points measured after two steps, and points measured after many).

    setup          returns (modules and tensors that are on the GPU before the first step, step)
    mixed          no longer needed: whether operations run in fp32 follows from autocast itself
    flash          as for `CudaKernels`: whether the GPU is an Ampere or newer (`GPU.bf16`)
    steps          how many; None goes on as said, six at most
    torch_version  a release such as "2.0", whose optimizers and workspaces are planned as far as
                   they are known (`tight_fit.trace.releases`); None for the installed one
    ranks          number of ranks that DistributedDataParallel works on; None without it
    Raises ValueError for a number of steps or ranks below 1 and an unknown release, TypeError where
    setup returns something else, NotImplementedError for what cannot be planned.
    """
    function("setup", setup)
    true_or_false("flash", flash)
    for name, number, most in (("steps", steps, 1000), ("ranks", ranks, 2**20)):
        if number is not None:
            whole(name, number, 1, most)
    places, release = Places(), parse(torch_version)
    with (
        data_parallel(ranks, places),
        as_if_real(convert=True),
        as_on_gpu(places, foreach=release >= (2, 0)),
        as_in(release),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeValues(),
        places,
        GPUCalls(places, flash),
        quantized_layers(places),
    ):
        on_gpu, step = _checked(setup())
        for item in on_gpu:
            if isinstance(item, nn.Module):
                quantize(item)
        tracker = GPUTracker(places)
        with steady_memory(), tracker:
            for item in on_gpu:
                tensors = _tensors_of(item) if isinstance(item, nn.Module) else item
                if not places.named:
                    places.put_on_gpu(_tensors_in(tensors))
                tracker.adopt(tensors, PARAMETERS if isinstance(item, nn.Module) else ACTIVATIONS)
            tracker.adopt_rest()
            tracker.storage_trace.begin = len(tracker.storage_trace.events)
            last, operations = _run(tracker, step, steps)
    trace, (last,) = tracker.counted([last])
    return CustomStepPlan(peak_of(trace, last), trace, last, operations, release)


class GPURecorder(Recorder):
    """Notes what runs on tensors that are on the GPU; the rest takes none of its time."""

    def __init__(self, places: Places):
        super().__init__(automatic=True)
        self.places = places

    def see(self, function, args, kwargs, out, way: str = "") -> None:
        """Note one operation, unless CUDA was named and all of its results are on the host."""
        results = _tensors_in(out)
        on_host = [not self.places.on_gpu(result.untyped_storage()) for result in results]
        if not (self.places.named and results and all(on_host)):
            super().see(function, args, kwargs, out, way)


def _run(
    tracker: GPUTracker, step: Callable[[], object], steps: int | None
) -> tuple[int, TracedOps]:
    """Run steps; return the event with which the last one began, and its operations."""
    begins: list[int] = []
    recorder = GPURecorder(tracker.places)
    for number in range(steps or MAX_STEPS):
        if steps is None or number == steps - 1:  # the last one, or one that may be the last
            recorder = tracker.recorder = GPURecorder(tracker.places)
        begins.append(len(tracker.storage_trace.events))
        step()
        if steps is None:
            trace, ends = tracker.counted([*begins[1:], len(tracker.storage_trace.events)])
            replay = Replay(WORKSPACE)
            reserved = [replay.run(trace, end).reserved for end in ends]
            if reserved[-2:] == reserved[-1:] * 2:
                break
    return begins[-1], recorder.traced


def _tensors_in(tensors: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]


def _checked(returned: object) -> tuple[OnGPU, Callable[[], object]]:
    if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
        raise TypeError(
            "setup must return two things: a list of what is on the GPU, and the step, a function."
        )
    return returned


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return _tensors_as_moved(module) + state_tensors(module)


def _tensors_as_moved(module: nn.Module) -> list[torch.Tensor]:
    """A module's tensors in the order in which `.to("cuda")` moves them: children first."""
    tensors = [tensor for child in module.children() for tensor in _tensors_as_moved(child)]
    own = [*module._parameters.values(), *module._buffers.values()]
    return tensors + [tensor for tensor in own if tensor is not None]


def peak_of(storage_trace: StorageTrace, last: int) -> int:
    """Most bytes alive after any event from `last` on."""
    alive = peak = 0
    for event, (kind, storage, _, _) in enumerate(storage_trace.events):
        alive += {BORN: 1, DIES: -1}.get(kind, 0) * storage_trace.bytes[storage]
        peak = alive if event < last else max(peak, alive)
    return peak


def least(storage_trace: StorageTrace) -> int:
    """Bytes that an allocator must be able to reserve, as `AllocationTrace.least`."""
    end = len(storage_trace.events)
    unlimited = Replay(WORKSPACE).run(storage_trace, end)
    low, high = unlimited.allocated, unlimited.reserved
    while high - low > max(ROUND, unlimited.allocated >> 10):
        middle = (low + high) // 2
        try:
            high = Replay(WORKSPACE, middle).run(storage_trace, end).reserved
        except CapacityExceeded:
            low = middle
    return high
