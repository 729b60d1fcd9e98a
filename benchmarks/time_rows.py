"""A published time beside its plan, and the two simpler estimates that plans are held against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.kernel_time import SIZE
from tight_fit.kernels.traced_ops import TracedOps

# The GPUs whose kernels NeuSight published, as it names them.
FITTED = {
    "Tesla T4": "T4",
    "Tesla P4": "P4",
    "Tesla P100-PCIE-16GB": "P100",
    "Tesla V100-PCIE-32GB": "V100-32GB",
    "NVIDIA A100-PCIE-40GB": "A100-40GB",
}


class Row(NamedTuple):
    """One published time with what is planned for it; times in seconds. `part` is "backward",
    "forward", "both" or "step"."""

    source: str
    gpu: str
    model: str
    kind: str
    part: str
    measured: float
    planned: float
    by_flops: float
    roofline: float
    held_out: bool


def by_flops(flops: int, peak: float) -> float:
    """Seconds by the usual rule: 40 % of the peak."""
    return flops / (0.4 * peak)


def roofline(traced: TracedOps, gpu: GpuSpecs, phases: Iterable[str]) -> float:
    """Seconds if every kernel ran at the peak of its arithmetic or of the memory, whichever ends
    later."""
    return sum(
        times
        * max(
            op.flops / gpu.peak(op.arithmetic if op.arithmetic in SIZE and op.flops else "fp32"),
            (op.read + op.written) / gpu.bandwidth,
        )
        for (op, phase), times in traced.counted().items()
        if phase in phases
    )
