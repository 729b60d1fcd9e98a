"""How long one kernel takes on a GPU: a model of the machine, its constants fitted from measured
kernels.

Matrix products. A product is cut into tiles, each computed by one multiprocessor. With `b` tiles on
`s` multiprocessors the slowest works through ceil(b / s) of them: the last wave may be nearly empty
(wave quantization). A small tile loads more numbers a multiplication than a large one, so it runs
at a smaller share of the peak. The library is taken to choose the tile, and the number of parts
that a long sum is cut into, that end first.

Everything else moves bytes: a kernel takes what its bytes take at the share of the memory's
bandwidth that such kernels were measured to reach. What fits into the level-2 cache moves faster.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.host_memory import KINDS
from tight_fit.kernels.op import Op

# fmt: off
TILES = (
    (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (32, 32),
)
# fmt: on
TENSOR_TILES = ((256, 128), (128, 256), *TILES)
PARTS = (1, 2, 4, 8, 16)
STEP = 8  # a sum is walked through in steps of so many terms
SIZE = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp64": 8, "fp8": 1}
# Softmax rows longer than this take another kernel (PyTorch, aten/src/ATen/native/cuda/SoftMax.cu).
WIDE = 1024
PRODUCTS = ("matmul", "convolution", "attention")
EIGHT_BIT = "8bit_blockwise"  # ends the names of bitsandbytes' updates
# Bytes an element that an update of fused AdamW in fp32 is described with, each way: weight,
# gradient and two states.
ADAM_BYTES = 2 * 4 * 4


@lru_cache(maxsize=1)
def constants() -> dict:
    """What benchmarks/fit_gpu_times.py and fit_gpu_steps.py wrote, with where it comes from."""
    return json.loads((Path(__file__).parent / "constants.json").read_text())


def tiled_seconds(
    shape,
    size: int,
    sms: int,
    peak: float,
    bandwidth: float,
    efficiency: float,
    small_tile: float,
    alone: float,
    start: float,
    tiles=TILES,
    parts=PARTS,
) -> np.ndarray:
    """Seconds of products (batch, m, n, k), arrays or numbers, on a GPU with nothing else to do.

    size        bytes a number
    peak        FLOP/s of the whole GPU; bandwidth: bytes/s that products reach
    efficiency  share of the peak that tiles of 128 × 128 reach
    small_tile  how much smaller tiles lose: a tile a × b reaches efficiency / (1 + small_tile (1/a
                + 1/b - 2/128))
    alone       a multiprocessor with a single tile takes `alone` times its share, since nothing
                hides its waits
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
            # Partial sums in fp32 are written and read again.
            extra = 2 * 4 * batch * m * n * cuts if cuts > 1 else 0
            best = np.minimum(best, np.maximum(busy, (moved + extra) / bandwidth))
    return best


def moving_seconds(moved, bandwidth: float, share: float, l2: int, faster: float) -> np.ndarray:
    """Seconds to move so many bytes (array or number) at `share` of the bandwidth; the part of them
    that fits into the level-2 cache beside the rest moves `faster` times as fast."""
    moved = np.asarray(moved, dtype=float)
    hit = np.clip(1 - moved / l2, 0, 1)
    return moved * (1 - hit * (1 - 1 / faster)) / (bandwidth * share)


def kernel_seconds(
    ops: Sequence[Op], gpu: GpuSpecs, tf32: bool = False, known: dict | None = None
) -> np.ndarray:
    """Seconds of each kernel on the GPU, float64 [kernels], without waiting for its launch.

    tf32   matrix products of fp32 numbers run on tensor cores where the GPU has TF32
    known  constants to use instead of those of constants.json
    Raises ValueError where a product is in an arithmetic that the GPU lacks.
    """
    known = known or constants()
    groups: dict[tuple, list[int]] = {}
    for index, op in enumerate(ops):
        groups.setdefault(_group(op, tf32 and bool(gpu.tf32)), []).append(index)
    seconds = np.zeros(len(ops))
    for (kind, arithmetic, flavour), indices in groups.items():
        some = [ops[index] for index in indices]
        if kind in ("wait", "message", *KINDS):  # the models of links charge for those
            continue
        moved = np.array([op.read + op.written for op in some], dtype=float)
        rule = _RULES.get(kind, _moving)
        gaps = known["shared"]["gap"] * np.array([op.kernels for op in some])
        seconds[indices] = rule(some, moved, kind, arithmetic, flavour, gpu, known) + gaps
    return seconds


def seconds_at_full_rate(op: Op, gpu: GpuSpecs, tf32: bool = False) -> float:
    """Seconds of a product at the rate of large products, the least that its FLOPs take however
    they are divided over kernels. 0 for a kernel that multiplies no matrices.

    tf32  as for `kernel_seconds`
    """
    if op.kind not in PRODUCTS:
        return 0.0
    known = constants()
    kind, arithmetic, flavour = _group(op, tf32 and bool(gpu.tf32))
    if kind == "attention":
        return op.flops / _attention_rate(op, known, gpu, arithmetic)
    rate = gpu.held(arithmetic)
    if kind != "convolution":
        rate *= _rule(known, gpu, arithmetic, flavour == "batched")["efficiency"]
    return op.flops / rate


def _group(op: Op, tf32: bool) -> tuple[str, str, str]:
    """(kind, arithmetic, flavour): operations of a group differ in their sizes only."""
    if op.kind not in PRODUCTS:
        wide = op.kind == "softmax" and op.shape and op.shape[1] > WIDE
        return "wide_softmax" if wide else op.kind, "", op.layout
    if op.arithmetic in ("fp32", "fp64"):
        arithmetic = "tf32" if tf32 and op.arithmetic == "fp32" else "fp32"
    else:
        arithmetic = op.arithmetic
    if op.kind == "matmul":
        return op.kind, arithmetic, "batched" if op.shape[0] > 1 else ""
    return op.kind, arithmetic, op.layout


def _rule(known: dict, gpu: GpuSpecs, arithmetic: str, batched: bool) -> dict:
    """The constants of a product for `tiled_seconds`. Those of tensor cores were fitted on an RTX
    3090, whose multiprocessors do 512 operations a clock; faster ones are harder to feed with
    numbers. A GPU that reaches less of its fp32 peak than an A100, for want of power, is taken to
    lose as much here. A GPU that was calibrated has its own."""
    if gpu.rates is not None:
        tiles = TILES if arithmetic == "fp32" else TENSOR_TILES
        found = gpu.rates.product(arithmetic, batched)
        assert found is not None, "a file without it is refused when it is read"
        return found._asdict() | {"tiles": tiles}
    measured = known["gpus"]
    if arithmetic == "fp32":
        return measured[gpu.like]["batched" if batched else "linear"] | {"tiles": TILES}
    rule, feeding = known["shared"]["tensor"], known["shared"]["feeding"]
    ops = gpu.tensor_ops or gpu.peak(arithmetic) / (gpu.sms * gpu.clock) * SIZE[arithmetic] / 2
    hunger = ops / 512
    reached = (measured[name]["linear"]["efficiency"] for name in (gpu.like, "A100-40GB"))
    power = min(1.0, next(reached) / next(reached))
    efficiency = rule["efficiency"] * power / (1 + feeding * max(0.0, hunger - 1))
    return rule | {"tiles": TENSOR_TILES, "efficiency": efficiency}


def _shares(known: dict, gpu: GpuSpecs) -> dict:
    """Shares of the bandwidth that kernels reach on a GPU, {kind: share}."""
    if gpu.rates is not None:
        return {name: share for name, share in gpu.rates.moving._asdict().items() if share}
    return known["gpus"][gpu.like]["moving"]


def _attention_rate(op: Op, known: dict, gpu: GpuSpecs, arithmetic: str) -> float:
    """FLOP/s of fused attention: a share of the peak where one is known of the GPU's generation,
    else of a large product's speed."""
    if gpu.attention and arithmetic in ("fp16", "bf16"):
        return gpu.peak(arithmetic) * gpu.attention[op.shape[3] > 64]
    share = known["shared"]["attention"] if gpu.rates is None else gpu.rates.attention
    return gpu.held(arithmetic) * _rule(known, gpu, arithmetic, False)["efficiency"] * share


def launch_seconds(gpu: GpuSpecs) -> dict[str, float]:
    """Seconds that the CPU takes: for an operation with a kernel ("kernel"), for each kernel more
    ("further"), for one without ("view")."""
    slower = 1.0 if gpu.rates is None else gpu.rates.dispatch
    return {name: seconds * slower for name, seconds in constants()["shared"]["dispatch"].items()}


def aligned(op: Op) -> bool:
    """Whether every row of a product's operands and result begins at a multiple of 16 bytes, for
    numbers of 16 bits; where one does not, cuBLAS has only kernels of older GPUs. Vocabularies are
    often odd: GPT-2's has 50,257 words."""
    _, m, n, k = op.shape
    layout = op.layout or "nn"  # the right operand's, then the left's
    rows = n, n if layout[0] == "n" else k, k if layout[1] == "n" else m
    return not any(row % 8 for row in rows if row > 1)


def _matmul(ops, moved, kind, arithmetic, flavour, gpu, known) -> np.ndarray:
    bandwidth = gpu.bandwidth * _shares(known, gpu)["elementwise"]
    rule = _rule(known, gpu, arithmetic, flavour == "batched")
    shapes, size = np.array([op.shape for op in ops]).T, SIZE[arithmetic]
    seconds = tiled_seconds(shapes, size, gpu.sms, gpu.held(arithmetic), bandwidth, **rule)
    if gpu.rates is not None and SIZE[arithmetic] == 2:
        slow = np.array([not aligned(op) for op in ops])
        seconds = np.where(slow, seconds / gpu.rates.unaligned, seconds)
    return seconds


def _convolution(ops, moved, kind, arithmetic, flavour, gpu, known) -> np.ndarray:
    """A product of pixels and taps whose operands are read once, not once a tap. In tensor cores
    channels come last: images in the other order are turned before and after."""
    own = known["shared"]["convolution"]
    bandwidth = gpu.bandwidth * _shares(known, gpu)["elementwise"]
    rule = _rule(known, gpu, arithmetic, False)
    if arithmetic != "fp32":
        rule |= {"small_tile": own["small_tile"]}
    shapes, size = np.array([op.shape for op in ops]).T, SIZE[arithmetic]
    busy = tiled_seconds(shapes, size, gpu.sms, gpu.held(arithmetic), np.inf, **rule)
    busy = busy / own["weights" if flavour.endswith("/weights") else "pixels"]
    if arithmetic != "fp32" and flavour.startswith("nhwc"):
        slow = np.array([_slow_groups(op) for op in ops])
        flops = np.array([op.flops for op in ops])
        busy = np.where(slow, flops / (gpu.held("fp32") * own["slow_groups"]), busy)
    seconds = np.maximum(busy, moved / (bandwidth * own["moving"]))
    if arithmetic != "fp32" and flavour.startswith("nchw"):
        seconds += own["turning"] * moved / bandwidth
    return seconds


def _slow_groups(op: Op) -> bool:
    """Whether cuDNN of 2022 has no tensor-core kernel for a grouped convolution with channels last:
    it has one for 8, 12, 16 ... groups of 4, 8, 16 or 32 channels."""
    groups, width = op.shape[0], op.shape[1 if op.layout.endswith("/weights") else 2]
    return groups > 1 and (groups < 8 or groups % 4 > 0 or width not in (4, 8, 16, 32))


def _depthwise(ops, moved, kind, arithmetic, flavour, gpu, known) -> np.ndarray:
    """A convolution of each channel by itself: no product of matrices, so its taps are multiplied
    outside tensor cores."""
    own = known["shared"]["depthwise"]
    share = _shares(known, gpu)["elementwise"] * own["moving"]
    busy = np.array([op.flops for op in ops]) / (gpu.held("fp32") * own[flavour])
    return np.maximum(moved / (gpu.bandwidth * share), busy)


def _attention(ops, moved, kind, arithmetic, flavour, gpu, known) -> np.ndarray:
    """Fused attention: its products never leave the chip. A block of queries begins and ends in the
    time of some keys more than the mean query has."""
    bandwidth = gpu.bandwidth * _shares(known, gpu)["elementwise"]
    start = gpu.rates.attention_start if gpu.rates is not None else 0.0
    keys = [op.shape[2] / (2 if op.layout == "causal" else 1) for op in ops]
    busy = [op.flops / _attention_rate(op, known, gpu, arithmetic) for op in ops]
    return np.maximum(np.array(busy) * (1 + start / np.array(keys)), moved / bandwidth)


def _moving(ops, moved, kind, arithmetic, flavour, gpu, known) -> np.ndarray:
    shares = _shares(known, gpu)
    name = f"{kind} {flavour}" if kind == "batch_norm" and flavour else kind
    if kind == "elementwise" and flavour in shares:
        kind = flavour
    share = shares["elementwise"] * known["shared"]["moving"].get(name, 1.0)
    if kind in shares and kind != "batch_norm":
        share = shares[kind]
    return moving_seconds(moved, gpu.bandwidth, share, gpu.l2, known["shared"]["l2"])


def _batch_norm(ops, moved, kind, arithmetic, flavour, gpu, known) -> np.ndarray:
    """PyTorch leaves batch norms to cuDNN, but for those in bf16 (aten/src/ATen/native,
    Normalization.cpp). Its own give each channel to one block, which is slow for images whose
    channels come first."""
    seconds = _moving(ops, moved, kind, arithmetic, flavour, gpu, known)
    share = _shares(known, gpu).get("batch_norm")
    if share is None or flavour != "nchw":
        return seconds
    own = np.array([op.arithmetic == "bf16" for op in ops])
    return np.where(own, moved / (gpu.bandwidth * share), seconds)


def _multi_tensor(ops, moved, kind, arithmetic, flavour, gpu, known) -> np.ndarray:
    """Optimizers. Where kernels of the GPU were measured: fused AdamW computes in fp32, and states
    in bf16 take it as long an element as states in fp32; 8-bit states take arithmetic."""
    if gpu.rates is None:
        return _moving(ops, moved, kind, arithmetic, flavour, gpu, known)
    elements = np.array([op.shape[0] if op.shape else 0 for op in ops], dtype=float)
    adam = np.array([op.name.startswith("_fused_adam") for op in ops])
    moved = np.where(adam, np.maximum(moved, ADAM_BYTES * elements), moved)
    seconds = _moving(ops, moved, kind, arithmetic, flavour, gpu, known)
    if gpu.rates.eight_bit:
        eight = np.array([op.name.endswith(EIGHT_BIT) for op in ops])
        seconds = np.where(eight, np.maximum(seconds, elements / gpu.rates.eight_bit), seconds)
    return seconds


_RULES = {
    "batch_norm": _batch_norm,
    "multi_tensor": _multi_tensor,
    "matmul": _matmul,
    "depthwise": _depthwise,
    "convolution": _convolution,
    "attention": _attention,
}
