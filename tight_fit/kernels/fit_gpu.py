"""From times of kernels on one GPU to its rates: the inverse of `kernel_time`.

Each constant is the one that makes its kind of kernel take what was measured; those of products,
four of them together, make the mean of |log(planned / measured)| least, found by a pattern search
(Hooke and Jeeves 1961).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from tight_fit.gpus.rates import BOUNDS, Moving, Product, Rates
from tight_fit.gpus.specs import ARITHMETICS, GpuSpecs
from tight_fit.gpus.table import GPU
from tight_fit.kernels.kernel_time import (
    SIZE,
    TENSOR_TILES,
    TILES,
    WIDE,
    aligned,
    constants,
    kernel_seconds,
    tiled_seconds,
)
from tight_fit.kernels.measure_gpu import GpuTimes, TimedKernel
from tight_fit.kernels.op import BACKWARD, FORWARD, OPTIMIZER, Op
from tight_fit.kernels.step_seconds import operation_times

ENOUGH = 6  # products that decide more than their efficiency
REACHED = {"elementwise": 0.9, "products": 0.9}  # of its peaks by a GPU that has no row
LIKE = {(6, 0): "P100", (7, 0): "V100-32GB", (7, 5): "T4"}  # others: P4 before, A100-40GB after
STARTS = tuple(range(0, 1050, 50))  # keys that are tried for `Rates.attention_start`
WIDE_LANES = 128  # multiply-adds a clock, but for the compute capabilities of NARROW
NARROW = ((6, 0), (7, 0), (7, 5), (8, 0))


def rates_of(found: GpuTimes, gpu: GpuSpecs, date: str) -> Rates:
    """The rates of a GPU by what was measured on it.

    gpu  the figures that the rates are shares of; where a kind of kernel was not measured, as there
         was no time for it, the constants of the GPU that it is like stay
    """
    known = constants()
    like = known["gpus"][gpu.like]
    shared = known["shared"]
    gap, faster = shared["gap"], shared["l2"]
    shares: dict[str, list[float]] = {}
    for one in found.kernels:
        largest = max(one.ops, key=lambda op: op.read + op.written)
        if _kind(largest) in Moving._fields:
            moved = sum(op.read + op.written for op in one.ops)
            hit = float(np.clip(1 - moved / gpu.l2, 0, 1))
            took = max(one.seconds - gap * sum(op.kernels for op in one.ops), 0.1 * one.seconds)
            share = moved * (1 - hit * (1 - 1 / faster)) / (gpu.bandwidth * took)
            shares.setdefault(_kind(largest), []).append(share)
    usual = like["moving"]["elementwise"]
    elementwise = statistics.median(shares.get("elementwise", [usual]))
    moving = {"elementwise": elementwise}
    for name in Moving._fields[1:]:
        if name in Moving._field_defaults and name not in shares:
            continue  # there is none to lend
        lent = like["moving"].get(name) or usual * shared["moving"].get(name, 1.0)
        moving[name] = statistics.median(shares.get(name, [lent * elementwise / usual]))
    kept = Moving(**{name: _bounded(name, share) for name, share in moving.items()})
    products = [
        _fitted(name, found.kernels, gpu, elementwise) if peak else None
        for name, peak in zip(_PRODUCTS, (gpu.fp32, gpu.fp32, gpu.tf32, gpu.fp16, gpu.bf16))
    ]
    dispatch, by_phase = _launches(found, gpu)
    linear, batched, tf32, fp16, bf16 = products
    assert linear is not None and batched is not None, "every GPU has fp32"
    without = Rates(
        kept,
        linear,
        batched,
        tf32,
        fp16,
        bf16,
        attention=1.0,
        dispatch=dispatch,
        link=_bounded("link", found.link),
        date=date,
        by_phase=by_phase,
    )
    without = without._replace(unaligned=_unaligned(found.kernels, gpu, without))
    return _attention(found.kernels, gpu, without)


_PRODUCTS = ("linear", "batched", "tf32", "fp16", "bf16")


def _launches(found: GpuTimes, gpu: GpuSpecs) -> tuple[float, tuple[float, float, float, float]]:
    """`Rates.dispatch` and `Rates.by_phase`. What is recomputed is issued as a forward pass is."""
    traced, seconds = found.step
    which, phase = traced.issued().T
    issued = operation_times(traced, gpu._replace(rates=None)).on_cpu[which]
    dispatch = _bounded("dispatch", sum(seconds) / float(issued.sum()))
    forward, backward, optimizer = (
        _bounded("by_phase", took / planned / dispatch) if planned else 1.0
        for took, planned in (
            (took, float(issued[phase == number].sum()))
            for number, took in zip((FORWARD, BACKWARD, OPTIMIZER), seconds)
        )
    )
    return dispatch, (forward, backward, forward, optimizer)


def _kind(op: Op) -> str:
    if op.kind == "elementwise" and op.layout:
        return op.layout
    return "wide_softmax" if op.kind == "softmax" and op.shape[1] > WIDE else op.kind


def _bounded(name: str, value: float) -> float:
    return float(np.clip(value, *BOUNDS[name]))


def _fitted(
    name: str, kernels: Sequence[TimedKernel], gpu: GpuSpecs, elementwise: float
) -> Product:
    """The constants of a class of products; `name` is that of its field in `Rates`."""
    arithmetic = "fp32" if name in ("linear", "batched") else name
    some = []
    for one in kernels:
        op = one.ops[0]
        own = "tf32" if one.tf32 and op.arithmetic == "fp32" else op.arithmetic
        flat = op.kind == "matmul" and op.shape[0] == 1
        if (
            op.kind == "matmul"
            and own == arithmetic
            and (arithmetic not in ("fp16", "bf16") or aligned(op))
            and (name not in _PRODUCTS[:2] or flat == (name == "linear"))
        ):
            some.append(one)
    known = constants()
    lent = known["gpus"][gpu.like].get(name) or known["shared"]["tensor"]
    start = {field: float(lent[field]) for field in Product._fields}
    if not some:
        return Product(**start)
    gap = known["shared"]["gap"]
    shape = np.array([one.ops[0].shape for one in some], dtype=float).T
    measured = np.array([one.seconds for one in some])

    def loss(point: dict[str, float]) -> float:
        planned = gap + tiled_seconds(
            shape,
            SIZE[arithmetic],
            gpu.sms,
            gpu.peak(arithmetic),
            gpu.bandwidth * elementwise,
            **point,
            tiles=TILES if arithmetic == "fp32" else TENSOR_TILES,
        )
        return float(np.abs(np.log(planned / measured)).mean())

    # The largest product says about how fast the GPU is: the search begins there.
    largest = max(some, key=lambda one: one.ops[0].flops)
    start["efficiency"] = _bounded(
        "efficiency", largest.ops[0].flops / largest.seconds / gpu.peak(arithmetic)
    )
    free = Product._fields if len(some) >= ENOUGH else ("efficiency",)
    best = (
        min(
            (_searched(loss, start | {"small_tile": tile}, free) for tile in (5.0, 20.0, 60.0)),
            key=loss,
        )
        if len(free) > 1
        else _searched(loss, start, free)
    )
    return Product(**best)


def _searched(loss, point: dict[str, float], free: Sequence[str]) -> dict[str, float]:
    """The point with the least loss that steps of one constant at a time find."""
    best, least, factor = dict(point), loss(point), 1.5
    while factor > 1.004:
        better = False
        for name in free:
            for times in (factor, 1 / factor):
                moved = best[name] * times
                if name == "start":  # may be 0
                    moved = best[name] + (8.0 if times > 1 else -8.0) * (factor - 1)
                tried = best | {name: _bounded(name, moved)}
                if (now := loss(tried)) < least - 1e-9:
                    best, least, better = tried, now, True
        if not better:
            factor = factor**0.5
    return best


def _unaligned(kernels: Sequence[TimedKernel], gpu: GpuSpecs, rates: Rates) -> float:
    """`Rates.unaligned`; 1 where no such product was measured."""
    reached = [1.0]
    for one in kernels:
        op = one.ops[0]
        if op.kind == "matmul" and op.arithmetic in ("fp16", "bf16") and not aligned(op):
            planned = float(kernel_seconds([op], gpu._replace(rates=rates)).sum())
            reached = [planned / one.seconds]
    return _bounded("unaligned", reached[0])


def _attention(kernels: Sequence[TimedKernel], gpu: GpuSpecs, rates: Rates) -> Rates:
    """The rates with what makes fused attention take what was measured: its share of the speed of
    products, which `rates` has as 1, and the keys for whose time a block of queries begins."""
    known = constants()["shared"]
    some = [one for one in kernels if any(op.kind == "attention" for op in one.ops)]
    if not some:
        return rates._replace(attention=_bounded("attention", known["attention"]))
    best, least = rates, np.inf
    for start in STARTS if len(some) > 1 else STARTS[:1]:
        tried = rates._replace(attention_start=start)
        slower = []
        for one in some:
            fused = [op.kind == "attention" for op in one.ops]
            planned = kernel_seconds(one.ops, gpu._replace(rates=tried, attention=()))
            gaps = known["gap"] * sum(op.kernels for op, is_it in zip(one.ops, fused) if is_it)
            attention = float(planned[fused].sum()) - gaps
            took = one.seconds - float(planned[np.logical_not(fused)].sum()) - gaps
            slower.append(attention / max(took, 0.1 * one.seconds))
        share = statistics.median(slower)
        off = statistics.fmean(abs(np.log(one / share)) for one in slower)
        if off < least - 1e-9:
            best, least = tried._replace(attention=_bounded("attention", share)), off
    return best


def figures_of(gpu: GPU, found: GpuTimes, sms: int, l2: int) -> GpuSpecs:
    """Figures of a GPU that has no row, by what was measured on it.

    Its peaks are taken to be a ninth more than its fastest kernels reach.
    """
    fastest = dict.fromkeys(ARITHMETICS, 0.0)
    bandwidth = 1e9
    for one in found.kernels:
        op = one.ops[0]
        if op.kind == "elementwise":
            bandwidth = max(bandwidth, (op.read + op.written) / one.seconds)
        if op.kind == "matmul":
            name = "tf32" if one.tf32 and op.arithmetic == "fp32" else op.arithmetic
            fastest[name] = max(fastest[name], op.flops / one.seconds)
    lanes = 64 if gpu.capability in NARROW else WIDE_LANES
    peaks = {name: rate / REACHED["products"] for name, rate in fastest.items()}
    return GpuSpecs(
        gpu.name,
        sms,
        lanes,
        peaks["fp32"] / (2 * sms * lanes),
        bandwidth / REACHED["elementwise"],
        l2,
        peaks["tf32"],
        peaks["fp16"],
        peaks["bf16"],
        LIKE.get(gpu.capability, "P4" if gpu.capability < (7, 0) else "A100-40GB"),
        "measured",
    )
