"""A traced step as bytes over time: what is alive at each event, by category, and whether a GPU
holds it.

A `Plan` is made from a `StorageTrace`. The tensors of the traced step may be real or fake (without
values).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tight_fit.checks import shown
from tight_fit.gpus import CONTEXT, GPU, MALLOC, MARGIN, WORKSPACE, as_gpu, cublas_workspace
from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.step_seconds import Seconds, seconds
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.memory.allocator import UNIT, AllocationTrace, AllocatorPeaks, replay
from tight_fit.techniques.settings import StepSettings
from tight_fit.trace.storage_trace import (
    BORN,
    CATEGORIES,
    DIES,
    HOST,
    MOVES,
    OPTIMIZER,
    PHASES,
    StorageTrace,
)
from tight_fit.units import GIB

BLOCK = {"cuda": UNIT, "cpu": 1}  # bytes that sizes are rounded up to


@dataclass(frozen=True, eq=False)
class Plan:
    """The memory of one optimizer step over time. Two plans are equal only if they are one object.

    >>> from tight_fit import plan_model
    >>> planned = plan_model("distilroberta-base", batch_size=8, length=128)
    >>> planned.peak_phase, planned.at_peak["parameters"]
    ('backward', 328489472)
    >>> f"{planned.seconds('A100').total:.3f} s"
    '0.023 s'

    recipe            the step that was planned: a `Recipe`, or a `ModelStep` of any model
    device            "cuda" or "cpu"
    timeline          int64 [events, 5], bytes alive after each event; the columns are `CATEGORIES`.
                      Of several micro-batches it holds the first two: the others repeat the second
    phases            int8 [events], index into `PHASES`
    flops             {"forward", "recompute", "backward"}: floating-point operations per optimizer
                      step (a multiply-add counts as two)
    parameters        number of parameters, trained or not
    largest_tensors   (bytes, category, operation that made it) of every storage alive at the peak,
                      largest first
    allocation_trace  births and deaths of the same events, for `allocator_peaks` and `overhead`
    operations        what a GPU runs in the step, for `seconds`; None where it was not traced
    host              most bytes in the host's memory at once: offloaded activations, optimizer
                      states and their copy of the weights, paged states; in no other figure
    """

    recipe: StepSettings
    device: str
    timeline: np.ndarray
    phases: np.ndarray
    flops: dict[str, int]
    parameters: int
    largest_tensors: list[tuple[int, str, str]]
    allocation_trace: AllocationTrace
    operations: TracedOps | None
    host: int = 0

    @property
    def peak_index(self) -> int:
        """Row of the timeline at which most bytes are alive (the first, if there are several)."""
        return _peak_index(self.timeline)

    @property
    def peak(self) -> int:
        """Bytes of tensors at the peak.

        `torch.cuda.max_memory_allocated` reports a little more: see `allocator_peaks`.
        """
        return int(self.timeline[self.peak_index].sum())

    @property
    def at_peak(self) -> dict[str, int]:
        """{category: bytes} at the peak."""
        return dict(zip(CATEGORIES, map(int, self.timeline[self.peak_index])))

    @property
    def highest(self) -> dict[str, int]:
        """{category: most bytes it ever reaches}; each category may reach them at another event."""
        return dict(zip(CATEGORIES, map(int, self.timeline.max(axis=0))))

    @property
    def peak_phase(self) -> str:
        """The phase that the peak falls in: "forward", "backward" or "optimizer", or
        "generation" of the completions of grpo."""
        return PHASES[self.phases[self.peak_index]]

    def allocator_peaks(self, gpu: str | GPU) -> AllocatorPeaks:
        """The allocated and the reserved peak (bytes) that PyTorch's CUDA allocator would report.

        Raises ValueError for an unknown GPU or a plan for a CPU.
        """
        if self.device != "cuda":
            raise ValueError('A CPU has no caching allocator: plan for device="cuda".')
        workspace = cublas_workspace(as_gpu(gpu)) // 2
        if workspace == WORKSPACE:
            return self.allocation_trace.unlimited
        return replay(self.allocation_trace, workspace)

    @property
    def overhead(self) -> int:
        """Bytes that the allocator needs in addition to the tensors for the step to run.

        These are the unused ends of blocks, and free blocks that are too small for the next tensor.
        For CUDA they are simulated (`AllocationTrace.least`); for a CPU they are a fixed fraction
        of the peak (`gpus.MALLOC`).
        """
        if self.device == "cuda":
            return self.allocation_trace.least - self.peak - 2 * WORKSPACE
        return int(self.peak * MALLOC)

    def seconds(self, gpu: str | GPU | GpuSpecs) -> Seconds:
        """How long the step takes on a GPU, with its phases, its kernels and an interval.

        It is a model of the machine, with constants fitted from published measurements
        (docs/gpu-time.md), and not exact as bytes are. Of a rank of a layout it is its own work,
        without its messages (`LayoutPlan.step_seconds` has them). Raises ValueError for an unknown
        GPU, one without an arithmetic that the step uses, and a plan whose operations were not
        traced: for a CPU, of real tensors, or by interpolation.
        """
        if self.operations is None:
            raise ValueError(
                'This plan has no seconds: only plan() and plan_model() for device="cuda" trace '
                "what a GPU runs."
            )
        return seconds(self.operations, gpu)

    def fits(self, gpu: str | GPU, allocator: bool = True) -> Fit:
        """Whether the step fits a GPU, with every term that decides it.

        allocator  False leaves out the allocator's overhead: a lower bound that needs no simulation
        Raises ValueError for an unknown GPU.
        """
        return fit_on_gpu(gpu, self.peak, self.overhead if allocator else 0)

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {size / GIB:.2f}" for name, size in self.at_peak.items())
        return f"{self.peak / GIB:.2f} GiB at the peak ({self.peak_phase}): {parts}"


@dataclass(frozen=True)
class Fit:
    """Whether a step fits a GPU; true in an `if` where it does.

    >>> from tight_fit import plan_model
    >>> fit = plan_model("distilroberta-base", batch_size=8, length=128).fits("RTX 3060")
    >>> bool(fit), fit.terms["CUDA context"]
    (True, 524288000)

    terms  {name: bytes}, everything that has to be on the GPU at the same time
    """

    gpu: GPU
    terms: dict[str, int]

    @property
    def need(self) -> int:
        """Bytes needed, the sum of the terms."""
        return sum(self.terms.values())

    @property
    def over(self) -> int:
        """Bytes needed beyond the GPU's memory; negative where there is room."""
        return self.need - self.gpu.memory

    def __bool__(self) -> bool:
        return self.over <= 0

    def __str__(self) -> str:
        room = f"{abs(self.over) / GIB:.1f} GiB " + ("too much" if self.over > 0 else "to spare")
        needed, memory = f"{self.need / GIB:.1f} GiB", f"{self.gpu.memory / GIB:.1f} GiB"
        return f"needs {needed}, the {self.gpu.name} has {memory}: {room}"


def fit_on_gpu(gpu: str | GPU, peak: int, overhead: int) -> Fit:
    """Whether a step fits a GPU, from two figures of its plan.

    peak      bytes of tensors at the peak (`Plan.peak`)
    overhead  bytes that the allocator needs in addition (`Plan.overhead`), 0 to leave it out
    Raises ValueError for an unknown GPU.
    """
    gpu = as_gpu(gpu)
    return Fit(
        gpu,
        {
            "tensors at the peak": peak,
            "cuBLAS workspace": cublas_workspace(gpu),
            "allocator": overhead,
            "margin": int(MARGIN * peak),
            "CUDA context": CONTEXT,
        },
    )


def check_device(device: str) -> None:
    """Raises ValueError for a device that cannot be planned for."""
    if not isinstance(device, str) or device not in BLOCK:
        raise ValueError(f"device={shown(device)} is not known: use cuda or cpu.")


def to_plan(
    traced: tuple[StorageTrace, int],
    recipe: StepSettings,
    device: str,
    sizes: np.ndarray | None = None,
) -> Plan:
    """Turn a traced step into a plan.

    traced  (trace of one step, number of parameters of the model)
    sizes   int64 [storages], bytes that replace those of the trace (`plans.batch_line`)
    """
    storage_trace, parameters = traced
    asked = np.array(storage_trace.bytes) if sizes is None else sizes
    rounded = -(-asked // BLOCK[device]) * BLOCK[device]
    # Everything that existed before the step is counted in the first row of the timeline.
    first = storage_trace.begin - 1
    everywhere = _changes(storage_trace, rounded).cumsum(axis=0)[first:]
    timeline, on_host = everywhere[:, :HOST].copy(), everywhere[:, HOST]
    phases = np.array([phase for _, _, _, phase in storage_trace.events], dtype=np.int8)[first:]
    alive = _alive_after(storage_trace, first + _peak_index(timeline))
    largest_tensors = sorted(
        (
            (int(rounded[storage]), CATEGORIES[category], storage_trace.made_by[storage])
            for storage, category in alive.items()
            if category != HOST
        ),
        reverse=True,
    )
    return Plan(
        recipe,
        device,
        timeline,
        phases,
        dict(storage_trace.flops),
        parameters,
        largest_tensors,
        _allocation_trace(storage_trace, asked),
        storage_trace.operations if sizes is None else None,
        int(on_host.max()),
    )


def _peak_index(timeline: np.ndarray) -> int:
    return int(timeline.sum(axis=1).argmax())


def _changes(storage_trace: StorageTrace, sizes: np.ndarray) -> np.ndarray:
    """int64 [events, 6], bytes that each event adds to each category, the host's last."""
    changes = np.zeros((len(storage_trace.events), HOST + 1), dtype=np.int64)
    category_of: dict[int, int] = {}
    for event, (kind, storage, category, _) in enumerate(storage_trace.events):
        if kind == BORN:
            changes[event, category] = sizes[storage]
        elif kind == DIES:
            changes[event, category] = -sizes[storage]
        elif kind == MOVES:
            changes[event, category_of[storage]] -= sizes[storage]
            changes[event, category] += sizes[storage]
        category_of[storage] = category
    return changes


def _alive_after(storage_trace: StorageTrace, event: int) -> dict[int, int]:
    """{storage: category} of all that is alive after an event."""
    alive: dict[int, int] = {}
    for kind, storage, category, _ in storage_trace.events[: event + 1]:
        if kind == DIES:
            del alive[storage]
        else:
            alive[storage] = category
    return alive


def _allocation_trace(storage_trace: StorageTrace, sizes: np.ndarray) -> AllocationTrace:
    """The calls that an allocator gets in the course of the traced step."""
    before = storage_trace.events[: storage_trace.begin]
    step = storage_trace.events[storage_trace.begin :]
    moves = [
        (storage + 1 if kind == BORN else -storage - 1, phase)
        for kind, storage, category, phase in step
        if kind != MOVES and category != HOST
    ]
    signed, phases = np.array(moves, dtype=np.int32).reshape(-1, 2).T
    given, states = (
        [
            storage
            for _, storage, category, _ in before
            if category != HOST and (category == OPTIMIZER) == are_states
        ]
        for are_states in (False, True)
    )
    return AllocationTrace(
        sizes, np.array(given, np.int32), np.array(states, np.int32), signed, phases.astype(np.int8)
    )
