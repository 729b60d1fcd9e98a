"""What one GPU was measured to reach, as `tight-fit calibrate` measures it on the GPU at hand."""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """The constants of matrix products, as `kernels.kernel_time.tiled_seconds` has them."""

    efficiency: float
    small_tile: float
    alone: float
    start: float


class Moving(NamedTuple):
    """Shares of the memory's bandwidth that kernels reach which multiply no matrices, by kind.

    strided, cast   elementwise kernels that walk through memory so (`kernels.op.Op`); None, as all
                    that follow, where it was not measured: then they take `elementwise`
    batch_norm      PyTorch's own batch norms of images, which it takes for bf16
    """

    elementwise: float
    softmax: float
    wide_softmax: float
    norm: float
    reduction: float
    transpose: float
    multi_tensor: float
    strided: float | None = None
    cast: float | None = None
    batch_norm: float | None = None


class Rates(NamedTuple):
    """What a GPU reaches, in place of the fitted constants of the GPU that it is like.

    moving     shares of the bandwidth
    linear     products in fp32; `batched` those with a batch
    tf32, fp16, bf16  products of tensor cores; None where the GPU has no such arithmetic
    attention  share of a large product's speed that fused attention reaches
    dispatch   how much longer its CPU takes to launch a kernel than the CPUs of constants.json
    link       bytes/s that copies between the GPU and its host's memory reach, each way
    date       when it was measured, as 2026-11-26
    attention_start  keys for whose time fused attention begins and ends with a block of queries
    eight_bit  elements/s that a step of bitsandbytes' 8-bit optimizers updates at most; 0 where it
               is taken to wait for memory alone
    eight_bit_launch  seconds that the CPU takes for each tensor of such a step, after which it
               waits for the GPU (bitsandbytes, optim/optimizer.py); 0 where they are not counted
    unaligned  share of its speed that a product of 16-bit numbers reaches where rows do not begin
               at multiples of 16 bytes (`kernel_time.aligned`)
    by_phase   how much longer an operation's launch takes in each of `kernels.op.PHASES`: Python
               and autograd's records in the forward pass, neither in the backward pass
    """

    moving: Moving
    linear: Product
    batched: Product
    tf32: Product | None
    fp16: Product | None
    bf16: Product | None
    attention: float
    dispatch: float
    link: float
    date: str
    attention_start: float = 0.0
    eight_bit: float = 0.0
    eight_bit_launch: float = 0.0
    unaligned: float = 1.0
    by_phase: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)

    def product(self, arithmetic: str, batched: bool) -> Product | None:
        """The constants of products in an arithmetic; None where it was not measured."""
        if arithmetic == "fp32":
            return self.batched if batched else self.linear
        # Products in FP8 are not measured: they are taken to reach the same share as bf16's.
        found: Product | None = getattr(self, "bf16" if arithmetic == "fp8" else arithmetic)
        return found


# What a rate may be: least and most. A pretended GPU is as slow as a CPU.
BOUNDS = {
    "efficiency": (1e-7, 4.0),
    "small_tile": (0.0, 1e4),
    "alone": (1.0, 100.0),
    "start": (0.0, 1e4),
    "attention": (1e-4, 100.0),
    "dispatch": (1e-3, 1e3),
    "link": (1e6, 1e13),
    "attention_start": (0.0, 1e5),
    "eight_bit": (0.0, 1e15),
    "eight_bit_launch": (0.0, 1.0),
    "unaligned": (1e-3, 4.0),
    "by_phase": (1e-3, 1e3),
} | dict.fromkeys(Moving._fields, (1e-7, 4.0))

_TENSOR = {"small_tile": 14.72, "alone": 1.2, "start": 14.73}  # as constants.json has them
# An NVIDIA H200 of 700 W with PyTorch 2.11 (results/). From results/calibrations: shares of
# elementwise kernels, softmax, norms, transposes and optimizers, the link, and the efficiencies of
# products, by those that take longer than a launch. From the kernels and times of Qwen3-0.6B's
# steps in results/models: `strided`, `cast`, `reduction`, `attention_start`, `eight_bit` and its
# launch, `by_phase`. From one step each there: `batch_norm` of ResNet-50's, `unaligned` of GPT-2
# medium's. Assumed: products in fp32 with a batch are as fast as others, `tf32`, and `attention`,
# which counts in fp32 alone. The rest of results/ is held out (benchmarks/gpu_seconds.py).
H200 = Rates(
    Moving(
        elementwise=0.9, softmax=0.838, wide_softmax=0.533, norm=0.559, reduction=0.334,
        transpose=0.24, multi_tensor=0.744, strided=0.54, cast=0.5, batch_norm=0.16,
    ),
    linear=Product(0.853, 10.61, 1.083, 0.0),
    batched=Product(0.853, 100.0, 1.944, 5.919),
    tf32=Product(0.6, **_TENSOR),
    fp16=Product(0.79, **_TENSOR),
    bf16=Product(0.81, **_TENSOR),
    attention=0.6,
    dispatch=1.0,
    link=55.2e9,
    date="2026-11-26",
    attention_start=330.0,
    eight_bit=34e9,
    eight_bit_launch=95e-6,
    unaligned=0.155,
    by_phase=(2.06, 0.985, 2.06, 0.895),
)  # fmt: skip
