"""A traced step as bytes over time: what is alive at each event, by category, and whether a GPU holds it.

A `Plan` is made from a `StorageTrace`, whether the tensors of that step were real or had no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from helpers.gpus import CONTEXT, GPU, MALLOC, MARGIN, WORKSPACE, cublas_workspace, find
from helpers.memory.allocator import UNIT, AllocationTrace, AllocatorPeaks, replay
from helpers.memory.tracker import BORN, CATEGORIES, DIES, MOVES, OPTIMIZER, PHASES, StorageTrace
from helpers.recipe import Recipe
from helpers.units import GIB

BLOCK = {"cuda": UNIT, "cpu": 1}  # bytes that sizes are rounded up to


@dataclass(frozen=True, eq=False)
class Plan:
    """One optimizer step, planned.

    timeline   int64 [moments, 5], bytes alive after each event, columns in the order of `CATEGORIES`; of the micro-batches
               the first two, since the others repeat the second
    phases     int8 [moments], index into `PHASES`
    flops      {"forward", "recompute", "backward"}: operations an optimizer step (a multiply-add counts as two)
    parameters number of parameters, trained or not
    makers     (bytes, category, operation) of everything alive at the peak, largest first
    ledger     births and deaths of the same moments by storage, for `occupied`
    """

    recipe: Recipe
    target: str
    timeline: np.ndarray
    phases: np.ndarray
    flops: dict[str, int]
    parameters: int
    largest_tensors: list[tuple[int, str, str]]
    allocation_trace: AllocationTrace

    @cached_property
    def peak_index(self) -> int:
        """Index of the peak in the timeline."""
        return int(self.timeline.sum(axis=1).argmax())

    @property
    def peak(self) -> int:
        """Bytes of tensors at the peak. What `torch.cuda.max_memory_allocated` says is a little more: see `occupied`."""
        return int(self.timeline[self.peak_index].sum())

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak by category."""
        return dict(zip(CATEGORIES, map(int, self.timeline[self.peak_index])))

    @property
    def highest(self) -> dict[str, int]:
        """The most bytes each category reaches, each at its own moment."""
        return dict(zip(CATEGORIES, map(int, self.timeline.max(axis=0))))

    @property
    def peak_phase(self) -> str:
        return PHASES[self.phases[self.peak_index]]

    def allocator_peaks(self, gpu: str | GPU, capacity: int | None = None) -> AllocatorPeaks:
        """What PyTorch's caching allocator makes of the step on a card: the allocated and the reserved peak, in bytes.

        capacity  bytes it may reserve, None for as much as it likes
        Raises ValueError for an unknown card or a plan for a CPU, allocator.OutOfMemory where the capacity does not suffice.
        """
        if self.target != "cuda":
            raise ValueError('A CPU has no caching allocator: plan for target="cuda".')
        return replay(
            self.allocation_trace,
            cublas_workspace(find(gpu) if isinstance(gpu, str) else gpu) // 2,
            capacity,
        )

    @property
    def overhead(self) -> int:
        """Bytes that the allocator must have beside the tensors for the step to run: unused ends of blocks, and free blocks
        too small for what comes. Simulated for CUDA (`allocator.AllocationTrace.least`), a stated share on a CPU."""
        return (
            self.allocation_trace.least - self.peak - 2 * WORKSPACE
            if self.target == "cuda"
            else int(self.peak * MALLOC)
        )

    def fits(self, gpu: str | GPU, allocator: bool = True) -> Fit:
        """Whether the step fits a card, with every term that decides it. Raises ValueError for an unknown card.

        allocator  False leaves its part out: a bound from below, for which nothing is simulated
        """
        gpu = find(gpu) if isinstance(gpu, str) else gpu
        return Fit(
            gpu,
            {
                "tensors at the peak": self.peak,
                "cuBLAS workspace": cublas_workspace(gpu),
                "allocator": self.overhead if allocator else 0,
                "margin": int(MARGIN * self.peak),
                "CUDA context": CONTEXT,
            },
        )

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {size / GIB:.2f}" for name, size in self.at_peak.items())
        return f"{self.peak / GIB:.2f} GiB at the peak ({self.peak_phase}): {parts}"


@dataclass(frozen=True)
class Fit:
    """Does it fit? `terms` are bytes, each named; `need` is their sum. True where the card holds it."""

    gpu: GPU
    terms: dict[str, int]

    @property
    def need(self) -> int:
        return sum(self.terms.values())

    @property
    def over(self) -> int:
        """Bytes over the card, negative where there is room."""
        return self.need - self.gpu.memory

    def __bool__(self) -> bool:
        return self.over <= 0

    def __str__(self) -> str:
        room = f"{abs(self.over) / GIB:.1f} GiB " + ("too much" if self.over > 0 else "to spare")
        return f"needs {self.need / GIB:.1f} GiB, the {self.gpu.name} has {self.gpu.memory / GIB:.1f} GiB: {room}"


def check_target(target: str) -> None:
    """Raises ValueError for a target that is not planned."""
    if target not in BLOCK:
        raise ValueError(f"target={target!r} is not known: use cuda or cpu.")


def to_plan(
    traced: tuple[StorageTrace, int], recipe: Recipe, target: str, sizes: np.ndarray | None = None
) -> Plan:
    """A story as a plan; `sizes` (bytes a storage) replace those that were seen."""
    storage_trace, parameters = traced
    asked = np.array(storage_trace.bytes) if sizes is None else sizes
    sizes = -(-asked // BLOCK[target]) * BLOCK[target]
    changes = np.zeros((len(storage_trace.events), len(CATEGORIES)), dtype=np.int64)
    phases = np.zeros(len(storage_trace.events), dtype=np.int8)
    where: dict[int, int] = {}
    for moment, (kind, storage, category, phase) in enumerate(storage_trace.events):
        phases[moment] = phase
        if kind == BORN:
            changes[moment, category] = sizes[storage]
        elif kind == DIES:
            changes[moment, category] = -sizes[storage]
        elif kind == MOVES:
            changes[moment, where[storage]] -= sizes[storage]
            changes[moment, category] += sizes[storage]
        if kind in (BORN, MOVES):
            where[storage] = category
    first = (
        storage_trace.begin - 1
    )  # the moment at which everything that was there before is counted
    timeline = changes.cumsum(axis=0)[first:]
    moment = int(timeline.sum(axis=1).argmax())
    alive: dict[int, int] = {}
    for kind, storage, category, _ in storage_trace.events[: first + moment + 1]:
        if kind in (BORN, MOVES):
            alive[storage] = category
        elif kind == DIES:
            del alive[storage]
    largest_tensors = sorted(
        ((int(sizes[s]), CATEGORIES[c], storage_trace.made_by[s]) for s, c in alive.items()),
        reverse=True,
    )
    return Plan(
        recipe,
        target,
        timeline,
        phases[first:],
        dict(storage_trace.flops),
        parameters,
        largest_tensors,
        _allocation_trace(storage_trace, asked),
    )


def _allocation_trace(storage_trace: StorageTrace, sizes: np.ndarray) -> AllocationTrace:
    """What an allocator is asked for in the course of a story."""
    before, events = (
        storage_trace.events[: storage_trace.begin],
        storage_trace.events[storage_trace.begin :],
    )
    moves = [
        (storage + 1 if kind == BORN else -storage - 1, phase)
        for kind, storage, _, phase in events
        if kind != MOVES
    ]
    signed, phases = np.array(moves, dtype=np.int32).reshape(-1, 2).T
    given, states = (
        [storage for _, storage, category, _ in before if (category == OPTIMIZER) == late]
        for late in (False, True)
    )
    return AllocationTrace(
        sizes, np.array(given, np.int32), np.array(states, np.int32), signed, phases.astype(np.int8)
    )
