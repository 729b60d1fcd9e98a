"""How long an optimizer step takes: its kernels one after another, as fast as the CPU can launch
them.

Two clocks run. The CPU issues operation after operation, each taking its dispatch time; the GPU
runs a kernel when it has been issued and the kernel before it has ended. Where kernels are long the
CPU runs ahead and its time is hidden; where they are short the GPU waits for it (launch-bound).
Asking for a value, as `.item()` does, makes the CPU wait for the GPU instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tight_fit.gpus import GPU
from tight_fit.gpus.specs import ARITHMETICS, GpuSpecs, find_gpu
from tight_fit.kernels.host_memory import KINDS, ends_with_host
from tight_fit.kernels.kernel_time import (
    EIGHT_BIT,
    PRODUCTS,
    constants,
    kernel_seconds,
    launch_seconds,
)
from tight_fit.kernels.op import PHASES, Op
from tight_fit.kernels.traced_ops import TracedOps


@dataclass(frozen=True)
class KernelShare:
    """One distinct kernel of a step: `seconds` of all its `times` runs in `phase`."""

    op: Op
    phase: str
    times: int
    seconds: float


@dataclass(frozen=True)
class Seconds:
    """The planned time of one optimizer step on a GPU.

    phases    seconds of "forward", "backward", "recompute" and "optimizer", waits included; their
              sum is the step
    waiting   seconds in which the GPU has nothing to do because the CPU has not launched it yet
    launches  kernels launched
    flops     floating-point operations of products, attention (half of them where it is causal)
              and convolutions
    again     of them those that only repeat the forward pass (gradient checkpointing)
    kernels   every distinct kernel, the one that takes most time first
    error     the share by which published steps of such GPUs were missed in nine cases of ten; see
              `low` and `high`
    measured  whether kernels of this very GPU were fitted, or measured by tight-fit calibrate; if
              not, its efficiencies are those of `gpu.like`
    """

    gpu: GpuSpecs
    phases: dict[str, float]
    waiting: float
    launches: int
    flops: int
    again: int
    kernels: tuple[KernelShare, ...]
    error: float
    measured: bool

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.phases.values())

    @property
    def low(self) -> float:
        return self.total * (1 - self.error)

    @property
    def high(self) -> float:
        return self.total * (1 + self.error)

    def top(self, count: int = 5) -> tuple[KernelShare, ...]:
        """The kernels that take most time, largest first."""
        return self.kernels[:count]

    def mfu(self, arithmetic: str) -> float:
        """Model FLOPs utilization: the share of the GPU's peak in `arithmetic` that the step uses.

        What is recomputed does not count (Chowdhery et al. 2022, PaLM, appendix B), and no product
        of an optimizer, which may run in another arithmetic. Raises ValueError where the GPU has no
        such arithmetic.
        """
        updates = sum(
            share.op.flops * share.times for share in self.kernels if share.phase == "optimizer"
        )
        return (self.flops - self.again - updates) / self.total / self.gpu.peak(arithmetic)

    def __str__(self) -> str:
        parts = " + ".join(
            f"{name} {seconds * 1e3:.1f}" for name, seconds in self.phases.items() if seconds
        )
        waits = (
            f", of it {self.waiting * 1e3:.1f} ms waiting for launches"
            if self.waiting > 0.01 * self.total
            else ""
        )
        if self.gpu.rates is not None:
            lent = f"; as it was measured on {self.gpu.rates.date}"
        elif self.measured:
            lent = ""
        else:
            lent = f"; no kernels of it were measured, those of the {self.gpu.like} stand for them"
        return (
            f"{self.total * 1e3:.1f} ms a step on the {self.gpu.name} "
            f"({self.low * 1e3:.0f} to {self.high * 1e3:.0f}): "
            f"{parts}{waits}{lent}"
        )


class OperationTimes(NamedTuple):
    """Times of the distinct operations of a step on a GPU; arrays [distinct operations].

    on_gpu    seconds of its kernels, float64
    on_cpu    seconds until the CPU has issued it, float64
    launches  kernels, int64
    waits     whether the CPU waits for its value, bool
    kernels   {kernel: its seconds}
    """

    on_gpu: np.ndarray
    on_cpu: np.ndarray
    launches: np.ndarray
    waits: np.ndarray
    kernels: dict[Op, float]


def operation_times(traced: TracedOps, gpu: GpuSpecs) -> OperationTimes:
    """How long each distinct operation keeps a GPU and the CPU that issues it busy.

    Raises ValueError where the GPU lacks an arithmetic of the step, and for a step with an
    operation that could not be described.
    """
    if traced.unknown:
        raise ValueError(traced.unknown)
    host = launch_seconds(gpu)
    flat = [op for ops in traced.ops for op in ops]
    each = kernel_seconds(flat, gpu, traced.tf32)
    begin = 0
    on_gpu, launches, waits = (np.zeros(len(traced.ops), kind) for kind in (float, int, bool))
    for index, ops in enumerate(traced.ops):
        on_gpu[index] = each[begin : begin + len(ops)].sum()
        launches[index] = sum(
            op.kernels for op in ops if op.kind not in ("wait", "message", *KINDS)
        )
        waits[index] = any(op.kind == "wait" for op in ops)
        begin += len(ops)
    on_cpu = np.where(
        launches > 0, host["kernel"] + host["further"] * np.maximum(launches - 1, 0), host["view"]
    )
    if gpu.rates is not None and gpu.rates.eight_bit_launch:
        eight = [any(op.name.endswith(EIGHT_BIT) for op in ops) for ops in traced.ops]
        on_cpu[eight], waits[eight] = gpu.rates.eight_bit_launch, True
    return OperationTimes(on_gpu, on_cpu, launches, waits, dict(zip(flat, each)))


def issuing(own: OperationTimes, which: np.ndarray, phase: np.ndarray, gpu: GpuSpecs) -> np.ndarray:
    """Seconds that the CPU takes for each operation that it issues, float64 [operations].

    which, phase  int64 [operations], as `TracedOps.issued` has them
    """
    on_cpu = own.on_cpu[which]
    return on_cpu if gpu.rates is None else on_cpu * np.array(gpu.rates.by_phase)[phase]


def seconds(traced: TracedOps, gpu: str | GPU | GpuSpecs) -> Seconds:
    """The time of a traced step on a GPU.

    Raises ValueError for an unknown GPU, one without an arithmetic that the step uses, or a step
    with an operation that could not be described; TypeError for no GPU at all.
    """
    specs, flops = find_gpu(gpu), traced.flops
    own = operation_times(traced, specs)
    which, phase = traced.issued().T
    clocks = issuing(own, which, phase, specs), own.on_gpu[which], own.waits[which]
    if any(op.kind in KINDS for ops in traced.ops for op in ops):
        ends = ends_with_host(traced.ops, which, *clocks, specs)
    else:
        ends = _two_clocks(*clocks)
    spent = np.diff(ends, prepend=0.0)
    phases = {name: float(spent[phase == number].sum()) for number, name in enumerate(PHASES)}
    times = own.kernels
    kernels = sorted(
        (
            KernelShare(op, name, count, float(times[op]) * count)
            for (op, name), count in traced.counted().items()
        ),
        key=lambda share: -share.seconds,
    )
    error = constants()["shared"]["error"]["measured" if specs.measured else "derived"]
    return Seconds(
        specs,
        phases,
        float(sum(phases.values()) - own.on_gpu[which].sum()),
        int(own.launches[which].sum()),
        sum(flops.values()),
        flops["recompute"],
        tuple(kernels),
        error,
        specs.measured,
    )


def lacks(traced: TracedOps, gpu: str | GPU | GpuSpecs) -> str:
    """The first arithmetic of a step's products that a GPU has not, "" where it has all.

    It is asked of the operations: weights in bf16 are multiplied in bf16 without autocast as well.
    Raises ValueError for a GPU whose speed is not known.
    """
    specs = find_gpu(gpu)
    used = {op.arithmetic for ops in traced.ops for op in ops if op.kind in PRODUCTS}
    without = sorted(kind for kind in used & set(ARITHMETICS) if not getattr(specs, kind))
    return without[0] if without else ""


def _two_clocks(on_cpu: np.ndarray, on_gpu: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """When the GPU has ended each operation, seconds from the step's begin, float64 [operations].

    The GPU ends operation i at max over j <= i of (issue of j + kernels j to i): whichever issue
    held it up last.
    """
    ends = np.zeros(len(on_cpu))
    clock = free = 0.0
    starts = [0, *(np.flatnonzero(waits) + 1), len(on_cpu)]
    for begin, end in zip(starts, starts[1:]):
        if begin == end:
            continue
        issued = clock + np.cumsum(on_cpu[begin:end])
        work = np.cumsum(on_gpu[begin:end])
        before = np.concatenate([[0.0], work[:-1]])
        ends[begin:end] = work + np.maximum.accumulate(np.maximum(issued, free) - before)
        free = ends[end - 1]
        clock = max(issued[-1], free) if waits[end - 1] else issued[-1]
    return ends
