"""How long one kernel takes on a GPU: a model of the machine, its constants fitted from measured kernels.

Matrix products. A product is cut into tiles, each computed by one multiprocessor. With `b` tiles on `s` multiprocessors
the slowest works through ceil(b / s) of them: the last wave may be nearly empty (wave quantization). A small tile loads
more numbers a multiplication than a large one, so it runs at a smaller share of the peak. The library is taken to choose
the tile, and the number of parts that a long sum is cut into, that end first.

Everything else moves bytes: a kernel takes what its bytes take at the share of the memory's bandwidth that such kernels were
measured to reach. What fits into the level-2 cache moves faster.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from helpers.timing.op import Op
from helpers.timing.specs import Gpu

TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (32, 32))
TENSOR_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
PARTS = (1, 2, 4, 8, 16)
STEP = 8  # a sum is walked through in steps of so many terms
SIZE = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp64": 8}
WIDE = 1024  # softmax rows longer than this take another kernel (PyTorch, aten/src/ATen/native/cuda/SoftMax.cu)
PRODUCTS = ("matmul", "convolution", "attention")


@lru_cache(maxsize=1)
def constants() -> dict:
    """What benchmarks/fit_gpu_times.py wrote, with where it comes from."""
    return json.loads((Path(__file__).parent / "constants.json").read_text())


def fitted(gpu: Gpu) -> dict:
    """The constants of the measured GPU that stands for `gpu`."""
    return constants()["gpus"][gpu.like]


def tiled_seconds(shape, size: int, sms: int, peak: float, bandwidth: float, efficiency: float, small_tile: float,
                  alone: float, start: float, tiles=TILES, parts=PARTS) -> np.ndarray:
    """Seconds of products (batch, m, n, k), arrays or numbers, on a GPU with nothing else to do.

    size        bytes a number
    peak        FLOP/s of the whole GPU; bandwidth: bytes/s that products reach
    efficiency  share of the peak that tiles of 128 × 128 reach
    small_tile  how much smaller tiles lose: a tile a × b reaches efficiency / (1 + small_tile (1/a + 1/b - 2/128))
    alone       a multiprocessor with a single tile takes `alone` times its share, since nothing hides its waits
    start       terms of a sum whose time the beginning and the end of a tile take
    """
    batch, m, n, k = (np.asarray(value, dtype=float) for value in shape)
    moved = size * batch * (m * k + k * n + m * n)
    best = np.full(np.broadcast(batch, m, n, k).shape, np.inf)
    for high, wide in tiles:
        share = efficiency / (1 + small_tile * max(0.0, 1 / high + 1 / wide - 2 / 128))
        blocks = batch * np.ceil(m / high) * np.ceil(n / wide)
        for cuts in parts:
            waves = np.maximum(np.ceil(blocks * cuts / sms), alone)
            terms = np.ceil(k / cuts / STEP) * STEP + start
            busy = waves * 2 * high * wide * terms * sms / (peak * share)
            extra = 2 * 4 * batch * m * n * cuts if cuts > 1 else 0  # partial sums, fp32, written and read again
            best = np.minimum(best, np.maximum(busy, (moved + extra) / bandwidth))
    return best


def moving_seconds(moved, bandwidth: float, share: float, l2: int, faster: float) -> np.ndarray:
    """Seconds to move so many bytes (array or number) at `share` of the bandwidth; the part of them that fits into the
    level-2 cache beside the rest moves `faster` times as fast."""
    moved = np.asarray(moved, dtype=float)
    hit = np.clip(1 - moved / l2, 0, 1)
    return moved * (1 - hit * (1 - 1 / faster)) / (bandwidth * share)


def arithmetic_of(op: Op, gpu: Gpu, tf32: bool) -> str:
    """The arithmetic in which a product runs; raises ValueError where the GPU has none."""
    return "tf32" if op.arithmetic == "fp32" and tf32 and gpu.tf32 else op.arithmetic


def kernel_seconds(ops: Sequence[Op], gpu: Gpu, tf32: bool = False) -> np.ndarray:
    """Seconds of each kernel on the GPU, float64 [kernels], without waiting for its launch.

    tf32  matrix products of fp32 numbers run on tensor cores where the GPU has TF32
    Raises ValueError where a product is in an arithmetic that the GPU lacks.
    """
    found = fitted(gpu)
    shared = constants()["shared"]
    gap = shared["gap"]
    return np.array([_product(op, gpu, found, shared, tf32) if op.kind in PRODUCTS else _moving(op, gpu, found, shared)
                     for op in ops]) + np.array([0.0 if op.kind == "wait" else gap * op.kernels for op in ops])


def _product(op: Op, gpu: Gpu, found: dict, shared: dict, tf32: bool) -> float:
    kind = arithmetic_of(op, gpu, tf32)
    peak, size = gpu.peak(kind if kind != "fp64" else "fp32"), SIZE[kind]
    share = found["moving"]["elementwise"]
    if op.kind == "attention":
        rule = shared["tensor" if kind != "fp32" else "attention"]
        busy = op.flops / (peak * (shared["attention"] if kind != "fp32" else found["linear"]["efficiency"] * 0.6))
        return max(busy, (op.read + op.written) / (gpu.bandwidth * share))
    tensor = kind != "fp32" and kind != "fp64"
    if tensor:
        rule = shared["tensor"]
    else:
        rule = found["batched" if op.shape[0] > 1 else "linear"]
    seconds = float(tiled_seconds(op.shape, size, gpu.sms, peak, gpu.bandwidth * share, **rule,
                                  tiles=TENSOR_TILES if tensor else TILES))
    if op.kind == "convolution":
        seconds = max(seconds / shared["convolution"], (op.read + op.written) / (gpu.bandwidth * share))
        if tensor and op.layout.startswith("nchw"):  # tensor cores want channels last: both sides are turned
            seconds += 2 * (op.read + op.written) / (gpu.bandwidth * share)
    return seconds


def _moving(op: Op, gpu: Gpu, found: dict, shared: dict) -> float:
    shares, derived = found["moving"], shared["moving"]
    kind = op.kind
    if kind == "softmax" and op.shape and op.shape[1] > WIDE:
        kind = "wide_softmax"
    share = shares[kind] if kind in shares else shares["elementwise"] * derived.get(kind, 1.0)
    return float(moving_seconds(op.read + op.written, gpu.bandwidth, share, gpu.l2, shared["l2"]))
