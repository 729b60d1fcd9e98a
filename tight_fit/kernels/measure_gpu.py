"""Kernels, launches and copies, timed on the GPU at hand.

Each measured operation is run once under `TraceOps`, so that it is described as a plan describes
it, and then so often that its time is that of the GPU: events of CUDA lie around many runs, behind
work that keeps the GPU busy until all of them are launched.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.op import Op
from tight_fit.kernels.trace_ops import TraceOps
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.units import MIB

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# m, n, k of products; small ones first, as their rate says whether there is time for large ones.
SHAPES = (
    (256, 256, 256),
    (512, 512, 512),
    (128, 4096, 1024),
    (1024, 1024, 1024),
    (512, 1024, 4096),
    (2048, 2048, 256),
    (2048, 768, 3072),
    (2048, 2048, 2048),
    (4096, 1024, 4096),
    (8192, 1024, 1024),
    (4096, 4096, 4096),
    (8192, 8192, 4096),
)
BATCHED = (  # batch, m, n, k: scores and values of attention that is written out
    (96, 128, 128, 64),
    (96, 128, 64, 128),
    (192, 512, 512, 64),
    (192, 512, 64, 512),
    (12, 512, 512, 64),
    (64, 1024, 1024, 128),
    (32, 2048, 64, 2048),
)
ODD = (4096, 4097, 1024)  # no row of 16-bit numbers begins at a multiple of 16 bytes
ATTENTION = ((4, 12, 512, 64), (2, 16, 2048, 64), (1, 32, 2048, 128))  # batch, heads, tokens, width
WIDTHS = {"softmax": 512, "wide_softmax": 4096, "norm": 1024}
MOVED = (64 * MIB, 256 * MIB)  # bytes of a tensor
COPIED = 256 * MIB
AT_ONCE = 0.02  # seconds of work between two events
LONGEST = 0.5  # seconds that a single run may take by what was measured before
LONG = 0.1  # seconds of a run that is timed once
RUNS = (3, 100)  # least and most between two events
SHORT = 0.002  # seconds of a run whose launch may take longer
AHEAD = 0.05  # most seconds of work before what is timed
STEPS = 20  # of the small model whose launches are timed


class TimedKernel(NamedTuple):
    """One operation, or several run together: what a plan sees of it, and its seconds."""

    ops: tuple[Op, ...]
    tf32: bool
    seconds: float


class GpuTimes(NamedTuple):
    """All that was measured.

    kernels  operations with their seconds
    step     a training step of a model so small that the GPU waits for launches: what a plan sees
             of it, and the seconds of its forward pass, backward pass and optimizer
    link     bytes/s of copies between the host's memory and the GPU's, the mean of both ways
    """

    kernels: tuple[TimedKernel, ...]
    step: tuple[TracedOps, tuple[float, ...]]
    link: float


def measure(
    specs: GpuSpecs | None, memory: int, until: float, say: Callable[[str], object]
) -> GpuTimes:
    """Time the GPU at hand, until `until` of time.perf_counter() at the latest.

    specs   says which arithmetic the GPU has; None has what its compute capability says
    memory  bytes of the GPU, of which a sixteenth is taken at most by a tensor
    say     is told what is being measured
    """
    clock = Stopwatch(until)
    say("launches")
    step = _small_step()
    kernels: list[TimedKernel] = []
    for name, work in _works(specs, memory):
        say(name)
        kernels += clock.timed(name, work)
    say("copies")
    link = _link(min(COPIED, memory // 16))
    return GpuTimes(tuple(kernels), step, link)


Work = Callable[[], object]


class Stopwatch:
    """Times works by CUDA events."""

    def __init__(self, until: float):
        self.until = until
        self._rates: dict[str, float] = {}  # cost per second of the last work of each name
        self._square = torch.randn(2048, 2048, device="cuda")
        self._busy = 0.0  # seconds of a product of the square
        self._ahead = 1  # of them before what is timed

    def timed(self, name: str, work: tuple[float, bool, Callable[[], Work]]) -> list[TimedKernel]:
        """The work timed, [] where there is no time or no room for it.

        work  (its cost in FLOPs or bytes, whether fp32 products are TF32, what makes it)
        """
        cost, tf32, make = work
        rate = self._rates.get(name)
        if time.perf_counter() > self.until or (rate and cost / rate > LONGEST):
            return []
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            run = make()
            run()  # the first alone makes an optimizer's states
            with TraceOps() as trace:
                run()
            seconds = self.seconds(run)
        except torch.OutOfMemoryError:
            return []
        finally:
            torch.set_float32_matmul_precision(before)
        self._rates[name] = cost / seconds
        traced = trace.traced
        ops = tuple(op for index, _ in traced.order for op in traced.ops[index])
        return [TimedKernel(ops, tf32, seconds)]

    def seconds(self, run: Work) -> float:
        """The median of three times of one run that has run before; one time where it is long."""
        if not self._busy:
            self._between(lambda: self._square @ self._square, 1)  # loads its kernel
            self._busy = self._between(lambda: self._square @ self._square, 3)
        once = self._between(run, 1)
        if once > LONG:
            return once
        count = min(max(RUNS[0], int(AT_ONCE / once)), RUNS[1])
        behind = once < SHORT and self._busy < AHEAD
        return statistics.median(self._between(run, count, behind) for _ in range(3))

    def _between(self, run: Work, count: int, behind: bool = False) -> float:
        """Seconds of a run by events around `count` of them.

        behind  keep the GPU busy until all are launched, or what is timed may be the launches: more
                and more so, as long as the GPU comes to them too early
        """
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            for _ in range(self._ahead if behind else 0):
                self._square @ self._square
            begin.record()
            for _ in range(count):
                run()
            early = behind and begin.query()
            end.record()
            torch.cuda.synchronize()
            if not early or 2 * self._ahead * self._busy > AHEAD:
                return begin.elapsed_time(end) / 1e3 / count
            self._ahead *= 2


def _works(
    specs: GpuSpecs | None, memory: int
) -> Iterator[tuple[str, tuple[float, bool, Callable[[], Work]]]]:
    """(name, work) of all that is timed, as `Stopwatch.timed` takes it."""
    able = {
        "fp32": True,
        "tf32": bool(specs.tf32) if specs else torch.cuda.get_device_capability() >= (8, 0),
        "fp16": bool(specs.fp16) if specs else torch.cuda.get_device_capability() >= (7, 0),
        "bf16": bool(specs.bf16) if specs else torch.cuda.get_device_capability() >= (8, 0),
    }
    yield from _moving(min(MOVED[0], memory // 32))
    for arithmetic, dtype in DTYPES.items():
        if not able[arithmetic]:
            continue
        tf32 = arithmetic == "tf32"
        for m, n, k in SHAPES:
            work = 2.0 * m * n * k, tf32, partial(_product, (1, m, n, k), dtype)
            yield f"products in {arithmetic}", work
        if arithmetic == ("bf16" if able["bf16"] else "fp16"):
            m, n, k = ODD
            work = 2.0 * m * n * k, False, partial(_product, (1, m, n, k), dtype)
            yield f"unaligned products in {arithmetic}", work
        for b, m, n, k in BATCHED:
            work = 2.0 * b * m * n * k, tf32, partial(_product, (b, m, n, k), dtype)
            yield f"batched products in {arithmetic}", work
    half = torch.bfloat16 if able["bf16"] else torch.float16
    for shape in ATTENTION if able["fp16"] else ():
        batch, heads, tokens, width = shape
        cost = 14.0 * batch * heads * tokens * tokens * width
        yield "attention", (cost, False, partial(_attention, shape, half))
    yield from _moving(min(MOVED[1], memory // 32))


def _moving(size: int) -> Iterator[tuple[str, tuple[float, bool, Callable[[], Work]]]]:
    """Kernels that wait for memory, on fp32 tensors of `size` bytes."""
    count = size // 4

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    def elementwise() -> Work:
        left, right = made(count), made(count)
        return lambda: left + right

    def along(name: str) -> Work:
        width = WIDTHS[name]
        rows = made(count // width, width)
        if name == "norm":
            weight, bias = made(width), made(width)
            return lambda: F.layer_norm(rows, (width,), weight, bias)
        return lambda: torch.softmax(rows, 1)

    def reduction() -> Work:
        rows = made(count // 1024, 1024)
        return lambda: rows.sum(0)

    def strided() -> Work:
        rows = made(count // 128, 128)
        scales = made(count // 128, 1)
        return lambda: rows * scales

    def cast() -> Work:
        halves = made(count).half()
        return lambda: halves.float()

    def transpose() -> Work:
        rows = made(count // 1024, 1024)
        return lambda: rows.t().contiguous()

    def multi_tensor() -> Work:
        weights = [torch.nn.Parameter(made(count // 4)) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        return torch.optim.AdamW(weights, fused=True).step

    yield "elementwise", (size, False, elementwise)
    yield "strided", (size, False, strided)
    yield "cast", (size, False, cast)
    for name in WIDTHS:
        yield name, (size, False, partial(along, name))
    yield "reduction", (size, False, reduction)
    yield "transpose", (size, False, transpose)
    yield "multi_tensor", (size, False, multi_tensor)


def _product(shape: tuple[int, ...], dtype: torch.dtype) -> Work:
    batch, m, n, k = shape
    left = torch.randn(batch, m, k, device="cuda").to(dtype)
    right = torch.randn(batch, k, n, device="cuda").to(dtype)
    if batch == 1:
        left, right = left[0], right[0]
    return lambda: left @ right


def _attention(shape: tuple[int, ...], dtype: torch.dtype) -> Work:
    """Fused attention, forward and backward."""
    query, key, value = (
        torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(3)
    )
    gradient = torch.randn(shape, device="cuda").to(dtype)

    def run() -> None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    return run


def _small_step() -> tuple[TracedOps, tuple[float, ...]]:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randn(1, 8, 64, device="cuda")

    def step() -> tuple[float, ...]:
        marks = [_now()]
        loss = model(tokens).sum()
        marks.append(_now())
        loss.backward()
        marks.append(_now())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(_now())
        return tuple(end - begin for begin, end in zip(marks, marks[1:]))

    for _ in range(3):
        step()
    with TraceOps(automatic=True) as trace:
        step()
    times = [step() for _ in range(STEPS)]
    return trace.traced, tuple(map(statistics.median, zip(*times)))


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _link(size: int) -> float:
    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((there, host), (host, there)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(3 * size / (time.perf_counter() - begin))
    return sum(rates) / 2
