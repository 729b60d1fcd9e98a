"""The time of copies between a GPU and its host's memory, and of what the CPU computes there.

A GPU copies in both directions while it computes. A copy begins when it has been issued, when what
was issued before it has run, and when the copies of its direction before it have ended. The GPU's
computation waits only where it is told to. What the CPU computes moves bytes through its memory.

The rates are of data sheets and not fitted: PCI Express as NVIDIA's sheets give it for each
generation of GPUs, at the 80 % that large copies from pinned memory reach (Nvidia's bandwidthTest
shows 12 to 13 of 15.75 GB/s for PCIe 3 x16); for the host two channels of DDR4-3200, half used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.op import Op

TO_HOST, FROM_HOST, ON_HOST, AWAIT = "to host", "from host", "host", "await"
KINDS = (TO_HOST, FROM_HOST, ON_HOST, AWAIT)
REACHED = 0.8  # of a link's rate
LINKS = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}  # bytes/s each way of PCIe x16, by generation
# NVIDIA's generations of GPUs by the architecture that their names tell; all others have PCIe 4.
OLDER = ("T4", "P4", "P100", "V100", "GTX", "RTX 20", "RTX 6000", "Titan")
NEWER = ("H100", "H200", "B100", "B200", "RTX 50")
HOST_RATE = 25e9  # bytes/s that the CPU reads and writes


def off_gpu(kernels: Sequence[Op], way: str) -> tuple[Op, ...]:
    """What an operation's kernels become where the host is part of it; see `Recorder.see`."""
    return tuple(
        op._replace(kind=way, flops=0, shape=(), layout="", kernels=int(way != ON_HOST))
        for op in kernels
    )


def waiting(way: str, still: int) -> Op:
    """The GPU waits for all but the last `still` copies of a way."""
    return Op(way, AWAIT, "fp32", 0, 0, 0, (still,), "", 0)


def link_rate(gpu: GpuSpecs) -> float:
    """Bytes per second that large copies between a GPU and its host reach, each way."""
    if gpu.rates is not None:
        return gpu.rates.link
    generation = 3 if gpu.name.startswith(OLDER) else 5 if gpu.name.startswith(NEWER) else 4
    return LINKS[generation] * REACHED


def ends_with_host(
    ops: Sequence[tuple[Op, ...]],
    which: np.ndarray,
    on_cpu: np.ndarray,
    on_gpu: np.ndarray,
    waits: np.ndarray,
    gpu: GpuSpecs,
) -> np.ndarray:
    """When each operation has ended, seconds from the step's begin, float64 [operations].

    As `step_seconds` has it for a step without the host's memory. An operation on a stream of its
    own counts as ended when what the GPU computes before it has.

    which               int64 [operations], indices into `ops`
    on_cpu, on_gpu      seconds of each operation
    waits               whether the CPU waits for its value
    """
    rate, clock, free = link_rate(gpu), 0.0, 0.0
    copied: dict[str, list[float]] = {TO_HOST: [0.0], FROM_HOST: [0.0]}
    ends = np.zeros(len(which))
    for place, index in enumerate(which):
        clock += on_cpu[place]
        for op in ops[index]:
            if op.kind in copied:
                begin = max(clock, free, copied[op.kind][-1])
                copied[op.kind].append(begin + op.written / rate)
            elif op.kind == AWAIT:
                ended = copied[op.name]
                free = max(free, ended[max(0, len(ended) - 1 - op.shape[0])])
            elif op.kind == ON_HOST:
                clock = max(clock, copied[TO_HOST][-1]) + (op.read + op.written) / HOST_RATE
        free = max(clock, free) + on_gpu[place] if on_gpu[place] else free
        if waits[place]:
            clock = max(clock, free)
        ends[place] = free
    if len(ends):  # what is still under way belongs to the step
        ends[-1] = max(free, clock, copied[TO_HOST][-1], copied[FROM_HOST][-1])
    return ends
