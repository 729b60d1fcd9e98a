"""The GPUs that readers have: one row says what a GPU holds and how fast it is, and where from.

Memory is what PyTorch sees (`torch.cuda.get_device_properties(0).total_memory`, the "total
capacity" of its out-of-memory messages): less than the label, as ECC and the driver take a part.
Drivers differ by some tens of MiB. The figures are stated from public reports of such messages, and
none was read from a GPU. Where no such report is known, the row has the least that is seen of the
size on GPUs of its generation. Of some rows the memory alone is known surely: no time is planned.

Peaks are dense, without sparsity, with sums kept in fp32: what PyTorch's products use. GeForce GPUs
halve their tensor cores' rate for such sums, to 512 operations a clock of a multiprocessor. fp32 is
lanes × 2 × boost clock, which the tests check. Where products in FP8 run in hardware, the data
sheets give them twice the rate of fp16, also those of GeForce (Ada and Blackwell, appendix A).

Hopper's boards do not hold the boost clock under load. An H100 of 700 W is planned in fp32 at 1.755
GHz: 18 times of NeuSight (arXiv 2407.13853) to which nothing was fitted were missed by 3.6 % in the
mean with it, and by 11.3 % with the boost clock. Boards of the same chip with lower limits are
taken to hold no more. Hopper's tensor cores do 4,096 operations a clock of a multiprocessor in
fp16, so their peaks are stated at yet other clocks: 1.83 GHz (SXM), 1.62 (PCIe), 1.545 (NVL).

Which arithmetic a GPU has follows from its compute capability (NVIDIA's list of CUDA GPUs): bf16
and TF32 from 8.0 on, FP8 from 8.9 on.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from tight_fit.gpus.rates import H200, Rates
from tight_fit.units import GIB

ARITHMETICS = ("fp32", "tf32", "fp16", "bf16", "fp8")
# The GPUs whose kernel times are fitted (constants.json).
MEASURED = ("T4", "P4", "P100", "V100-32GB", "A100-40GB")


class GPU(NamedTuple):
    """One kind of GPU.

    >>> from tight_fit import GPU, plan_model
    >>> mine = GPU("my card", memory=15 * 2**30, capability=(8, 6))
    >>> bool(plan_model("distilroberta-base", gpu=mine).fits(mine))
    True

    memory      bytes as PyTorch sees them (`torch.cuda.get_device_properties(0).total_memory`):
                less than the label says, because ECC and the driver take a part
    capability  compute capability, (major, minor); (0, 0) for a machine without a GPU
    """

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def bf16(self) -> bool:
        """Whether matrix products in bf16 run in hardware."""
        return self.capability >= (8, 0)

    @property
    def fp8(self) -> bool:
        """Whether matrix products in 8-bit floating point run in hardware as torchao has them; of
        AMD's GPUs no plan knows."""
        return self.capability >= (8, 9) and not self.name.startswith("MI")


class GpuSpecs(NamedTuple):
    """A GPU for timing.

    name       as `tight_fit.gpus` names it, where it does
    sms        streaming multiprocessors
    lanes      fp32 multiply-adds a clock of one multiprocessor
    clock      boost clock, Hz
    bandwidth  of its memory, bytes/s
    l2         bytes of level-2 cache
    tf32, fp16, bf16  peak of matrix products with fp32 sums, FLOP/s; 0 where the GPU has no such
                      arithmetic
    like       the measured GPU whose efficiencies it takes; its own name where it was measured
               itself
    source     the data sheet
    fp8        the same in 8-bit floating point
    rates      what this very GPU was measured to reach (`gpus.calibration`); None where it was not
    tensor_ops operations a clock of a multiprocessor's tensor cores in fp16; 0 where they follow
               from the peak and the boost clock
    sustained  clock that fp32 arithmetic holds under load, Hz; 0 where the boost clock is taken
    watts      power limit by the data sheet, for which `sustained` holds; 0 where the row has none
    attention  shares of its peak that fused attention reaches in fp16 and bf16, of heads up to 64
               wide and of wider ones; () where they follow from the speed of large products
    Raises ValueError or TypeError, in one sentence, where a figure makes no GPU (`described`).
    """

    name: str
    sms: int
    lanes: int
    clock: float
    bandwidth: float
    l2: int
    tf32: float
    fp16: float
    bf16: float
    like: str
    source: str
    rates: Rates | None = None
    fp8: float = 0.0
    tensor_ops: int = 0
    sustained: float = 0.0
    watts: int = 0
    attention: tuple[float, ...] = ()

    @property
    def fp32(self) -> float:
        """Peak of fp32 arithmetic outside tensor cores, FLOP/s."""
        return self.sms * self.lanes * 2 * self.clock

    def peak(self, arithmetic: str) -> float:
        """Peak rate, FLOP/s. Raises ValueError where the GPU has no such arithmetic."""
        if arithmetic not in ARITHMETICS:
            raise ValueError(
                f"arithmetic={arithmetic!r} is not known: use one of {', '.join(ARITHMETICS)}."
            )
        rate = getattr(self, arithmetic)
        if not rate:
            able = [kind for kind in ARITHMETICS if getattr(self, kind)]
            raise ValueError(
                f"The {self.name} has no {arithmetic} arithmetic: use {' or '.join(able)}."
            )
        return rate

    def held(self, arithmetic: str) -> float:
        """Rate at the clock that is held under load, FLOP/s. Raises ValueError as `peak`."""
        slower = self.sustained / self.clock if arithmetic == "fp32" and self.sustained else 1.0
        return self.peak(arithmetic) * slower

    @property
    def measured(self) -> bool:
        """Whether kernels of this very GPU were fitted or measured."""
        return self.rates is not None or self.like == self.name


class _Row(NamedTuple):
    gpu: GPU
    specs: GpuSpecs | None


GEFORCE, FULL = 512, 1024  # operations a clock of a multiprocessor's tensor cores, sums in fp32
HOPPER = 4096  # the same of Hopper, whose products' peaks are stated at another clock
HOPPER_HOLDS = 1.755  # GHz in fp32
# Forward and backward pass of 4,096 tokens together, by the figures 5 and 6 of FlashAttention-3's
# paper (Shah et al. 2024, arXiv 2407.08608): heads of 64, and of 128. There PyTorch takes cuDNN's
# kernels from release 2.11 on, before that those of FlashAttention-2.
CUDNN_ATTENTION, FLASH_2_ATTENTION = (0.42, 0.52), (0.30, 0.32)
TWICE = 256  # the same of a multiprocessor without tensor cores: twice its 64 multiply-adds in fp32


def _row(
    name: str,
    memory: float,
    capability: tuple[int, int],
    sms: int,
    lanes: int,
    clock: float,
    bandwidth: float,
    l2: float,
    fp16: float,
    like: str,
    source: str,
    tf32: float | None = None,
    watts: int = 0,
    rates: Rates | None = None,
) -> _Row:
    """A row in the units of data sheets: GiB, GHz, GB/s, MiB, and TFLOP/s of fp16 products.

    fp16  it is instead what a multiprocessor does a clock where it is `TWICE`, `GEFORCE` or `FULL`
    tf32  TFLOP/s; half of fp16 where the data sheet does not round it otherwise
    """
    gpu = GPU(name, int(memory * GIB), capability)
    rate = sms * fp16 * clock * 1e9 if fp16 in (TWICE, GEFORCE, FULL) else fp16 * 1e12
    bf16 = rate if gpu.bf16 else 0
    by_sheet = rate / 2 if tf32 is None else tf32 * 1e12
    figures = sms, lanes, clock * 1e9, bandwidth * 1e9, int(l2 * 2**20)
    specs = GpuSpecs(name, *figures, by_sheet if bf16 else 0, rate, bf16, like, source)
    specs = specs._replace(fp8=2 * rate if gpu.fp8 else 0.0, watts=watts, rates=rates)
    if capability == (9, 0):
        held = min(clock, HOPPER_HOLDS) * 1e9
        specs = specs._replace(tensor_ops=HOPPER, sustained=held, attention=CUDNN_ATTENTION)
    return _Row(gpu, specs)


def _memory(name: str, memory: float, capability: tuple[int, int]) -> _Row:
    """A row of memory alone, in GiB. An AMD GPU's capability is PyTorch's name of its kind."""
    return _Row(GPU(name, int(memory * GIB), capability), None)


_TURING = "NVIDIA Turing GPU Architecture, WP-09183-001"
_PASCAL = "NVIDIA Tesla P100, WP-08019-001"
_VOLTA = "NVIDIA V100 data sheet (January 2020) and NVIDIA Tesla V100, WP-08608-001"
_AMPERE = "NVIDIA A100 data sheet (June 2021) and NVIDIA A100 Tensor Core GPU Architecture"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture V2, appendix A"
_ADA = "NVIDIA Ada GPU Architecture V2, appendix A"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet and NVIDIA H100 Tensor Core GPU Architecture"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, appendix A"
_GEFORCE = "NVIDIA's specifications of GeForce GPUs"
_LAPTOP = "NVIDIA's specifications of GeForce laptops: the highest boost clock"
_QUADRO = "NVIDIA Quadro RTX data sheets; " + _TURING
_RTX_A = "NVIDIA RTX A2000, A4500 and A5500 data sheets"
_EXPORT = "NVIDIA A800 and H800 data sheets: an A100's and an H100's figures but for NVLink"
T4, P100, V100, A100 = "T4", "P100", "V100-32GB", "A100-40GB"

# fmt: off
_MEMORY_ALONE = (
    # name, GiB, capability
    ("RTX 2060 Laptop", 5.79, (7, 5)), ("RTX 2070 Laptop", 7.79, (7, 5)),
    ("RTX 2080 Laptop", 7.79, (7, 5)), ("GTX 1650 Laptop", 3.81, (7, 5)),
    ("GTX 1660 Ti Laptop", 5.79, (7, 5)), ("RTX 3050 Ti Laptop", 3.81, (8, 6)),
    ("RTX 3070 Ti Laptop", 7.79, (8, 6)), ("RTX 3080 Ti Laptop", 15.70, (8, 6)),
    ("RTX 3060 8GB", 7.75, (8, 6)), ("RTX 4050 Laptop", 5.75, (8, 9)),
    ("RTX 5050", 7.53, (12, 0)), ("RTX 5050 Laptop", 7.53, (12, 0)),
    ("RTX 5060 Laptop", 7.53, (12, 0)), ("RTX 5070 Laptop", 7.53, (12, 0)),
    ("RTX 5070 Ti Laptop", 11.49, (12, 0)), ("RTX 5080 Laptop", 15.47, (12, 0)),
    ("RTX 5090 D", 31.36, (12, 0)),
    ("Quadro P4000", 7.90, (6, 1)), ("Quadro P5000", 15.85, (6, 1)),
    ("Quadro P6000", 23.80, (6, 1)), ("Quadro GV100", 31.70, (7, 0)),
    ("RTX 2000 Ada", 15.60, (8, 9)), ("RTX 4000 Ada", 19.50, (8, 9)),
    ("RTX 5000 Ada", 31.30, (8, 9)), ("RTX 5880 Ada", 47.30, (8, 9)),
    ("RTX PRO 2000", 15.40, (12, 0)), ("RTX PRO 4000", 23.40, (12, 0)),
    ("RTX PRO 4500", 31.30, (12, 0)), ("RTX PRO 5000", 47.00, (12, 0)),
    ("H20", 95.00, (9, 0)), ("GB200", 184.00, (10, 0)), ("B300", 267.00, (10, 3)),
    ("MI100", 31.98, (9, 0)), ("MI210", 63.98, (9, 0)),
    # PyTorch sees each of the two halves as a GPU.
    ("MI250", 63.98, (9, 0)), ("MI250X", 63.98, (9, 0)),
    ("MI300X", 191.69, (9, 4)), ("MI325X", 255.50, (9, 4)),
    ("MI350X", 287.00, (9, 5)), ("MI355X", 287.00, (9, 5)),
)
_TABLE = (
    # name, GiB, capability, multiprocessors, lanes, GHz, GB/s, MiB of level-2 cache, fp16 products,
    #     the measured GPU that it is like, source
    _row("GTX 1650", 3.81, (7, 5), 14, 64, 1.665, 128, 1, TWICE, T4, _GEFORCE),
    _row("GTX 1650 Super", 3.81, (7, 5), 20, 64, 1.725, 192, 1, TWICE, T4, _GEFORCE),
    _row("GTX 1660", 5.79, (7, 5), 22, 64, 1.785, 192, 1.5, TWICE, T4, _GEFORCE),
    _row("GTX 1660 Super", 5.79, (7, 5), 22, 64, 1.785, 336, 1.5, TWICE, T4, _GEFORCE),
    _row("GTX 1660 Ti", 5.79, (7, 5), 24, 64, 1.77, 288, 1.5, TWICE, T4, _GEFORCE),
    _row("GTX 1050 Ti", 3.94, (6, 1), 6, 128, 1.392, 112, 1, 0, "P4", _GEFORCE),
    _row("GTX 1060 6GB", 5.93, (6, 1), 10, 128, 1.708, 192, 1.5, 0, "P4", _GEFORCE),
    _row("GTX 1070", 7.92, (6, 1), 15, 128, 1.683, 256, 2, 0, "P4", _GEFORCE),
    _row("GTX 1070 Ti", 7.92, (6, 1), 19, 128, 1.683, 256, 2, 0, "P4", _GEFORCE),
    _row("GTX 1080", 7.92, (6, 1), 20, 128, 1.733, 320, 2, 0, "P4", _GEFORCE),
    _row("GTX 1080 Ti", 10.91, (6, 1), 28, 128, 1.582, 484, 2.75, 0, "P4", _GEFORCE),
    _row("Titan X Pascal", 11.90, (6, 1), 28, 128, 1.531, 480, 3, 0, "P4", _GEFORCE),
    _row("Titan Xp", 11.90, (6, 1), 30, 128, 1.582, 547.7, 3, 0, "P4", _GEFORCE),
    _row("RTX 2060", 5.79, (7, 5), 30, 64, 1.68, 336, 3, GEFORCE, T4, _GEFORCE),
    _row("RTX 2060 12GB", 11.76, (7, 5), 34, 64, 1.65, 336, 3, GEFORCE, T4, _GEFORCE),
    _row("RTX 2060 Super", 7.79, (7, 5), 34, 64, 1.65, 448, 4, GEFORCE, T4, _GEFORCE),
    _row("RTX 2070", 7.79, (7, 5), 36, 64, 1.62, 448, 4, GEFORCE, T4, _TURING),
    _row("RTX 2070 Super", 7.79, (7, 5), 40, 64, 1.77, 448, 4, GEFORCE, T4, _GEFORCE),
    _row("RTX 2080", 7.79, (7, 5), 46, 64, 1.71, 448, 4, GEFORCE, T4, _TURING),
    _row("RTX 2080 Super", 7.79, (7, 5), 48, 64, 1.815, 496, 4, GEFORCE, T4, _GEFORCE),
    _row("RTX 2080 Ti", 10.76, (7, 5), 68, 64, 1.545, 616, 5.5, GEFORCE, T4, _TURING),
    _row("Titan RTX", 23.65, (7, 5), 72, 64, 1.77, 672, 6, FULL, T4, _TURING),
    _row("Titan V", 11.77, (7, 0), 80, 64, 1.455, 653, 4.5, 110, V100, _GEFORCE),
    _row("Quadro RTX 4000", 7.79, (7, 5), 36, 64, 1.545, 416, 4, FULL, T4, _QUADRO),
    _row("Quadro RTX 5000", 15.70, (7, 5), 48, 64, 1.815, 448, 4, FULL, T4, _QUADRO),
    _row("Quadro RTX 6000", 23.65, (7, 5), 72, 64, 1.77, 672, 6, FULL, T4, _QUADRO),
    _row("RTX 8000", 47.46, (7, 5), 72, 64, 1.77, 672, 6, FULL, T4, _QUADRO),
    _row("RTX 3050 Laptop", 3.81, (8, 6), 16, 128, 1.74, 192, 2, GEFORCE, A100, _LAPTOP),
    _row("RTX 3060 Laptop", 5.80, (8, 6), 30, 128, 1.703, 336, 3, GEFORCE, A100, _LAPTOP),
    _row("RTX 3070 Laptop", 7.79, (8, 6), 40, 128, 1.62, 448, 4, GEFORCE, A100, _LAPTOP),
    _row("RTX 3080 Laptop", 15.74, (8, 6), 48, 128, 1.71, 448, 4, GEFORCE, A100, _LAPTOP),
    _row("RTX 3050", 7.79, (8, 6), 20, 128, 1.777, 224, 2, GEFORCE, A100, _GEFORCE),
    _row("RTX 3060", 11.76, (8, 6), 28, 128, 1.777, 360, 3, 25.5, A100, _GA102, tf32=12.7),
    _row("RTX 3060 Ti", 7.79, (8, 6), 38, 128, 1.665, 448, 4, GEFORCE, A100, _GEFORCE),
    _row("RTX 3070", 7.79, (8, 6), 46, 128, 1.725, 448, 4, GEFORCE, A100, _GA102),
    _row("RTX 3070 Ti", 7.79, (8, 6), 48, 128, 1.77, 608, 4, GEFORCE, A100, _GEFORCE),
    _row("RTX 3080", 9.78, (8, 6), 68, 128, 1.71, 760, 5, GEFORCE, A100, _GA102),
    _row("RTX 3080 12GB", 11.77, (8, 6), 70, 128, 1.71, 912, 6, GEFORCE, A100, _GEFORCE),
    _row("RTX 3080 Ti", 11.77, (8, 6), 80, 128, 1.665, 912, 6, GEFORCE, A100, _GEFORCE),
    _row("RTX 3090", 23.69, (8, 6), 82, 128, 1.695, 936, 6, 71, A100, _GA102, tf32=35.6),
    _row("RTX 3090 Ti", 23.69, (8, 6), 84, 128, 1.86, 1008, 6, GEFORCE, A100, _GEFORCE),
    _row("RTX 4060 Laptop", 7.75, (8, 9), 24, 128, 1.89, 256, 32, 23.2, A100, _ADA),
    _row("RTX 4070 Laptop", 7.75, (8, 9), 36, 128, 2.175, 256, 32, GEFORCE, A100, _LAPTOP),
    _row("RTX 4080 Laptop", 11.72, (8, 9), 58, 128, 2.28, 432, 48, GEFORCE, A100, _LAPTOP),
    _row("RTX 4090 Laptop", 15.70, (8, 9), 76, 128, 2.04, 576, 64, GEFORCE, A100, _LAPTOP),
    _row("RTX 4060", 7.62, (8, 9), 24, 128, 2.46, 272, 24, GEFORCE, A100, _GEFORCE),
    _row("RTX 4060 Ti 8GB", 7.62, (8, 9), 34, 128, 2.535, 288, 32, GEFORCE, A100, _GEFORCE),
    _row("RTX 4060 Ti 16GB", 15.60, (8, 9), 34, 128, 2.535, 288, 32, GEFORCE, A100, _GEFORCE),
    _row("RTX 4070", 11.72, (8, 9), 46, 128, 2.475, 504, 36, GEFORCE, A100, _GEFORCE),
    _row("RTX 4070 Super", 11.72, (8, 9), 56, 128, 2.475, 504, 48, GEFORCE, A100, _GEFORCE),
    _row("RTX 4070 Ti", 11.72, (8, 9), 60, 128, 2.61, 504, 48, GEFORCE, A100, _GEFORCE),
    _row("RTX 4070 Ti Super", 15.70, (8, 9), 66, 128, 2.61, 672, 48, GEFORCE, A100, _GEFORCE),
    _row("RTX 4080", 15.70, (8, 9), 76, 128, 2.505, 716.8, 64, GEFORCE, A100, _ADA),
    _row("RTX 4080 Super", 15.70, (8, 9), 80, 128, 2.55, 736, 64, GEFORCE, A100, _GEFORCE),
    _row("RTX 4090", 23.64, (8, 9), 128, 128, 2.52, 1008, 72, 165.2, A100, _ADA),
    _row("RTX 4090 D", 23.64, (8, 9), 114, 128, 2.52, 1008, 72, GEFORCE, A100, _GEFORCE),
    _row("RTX 5090 Laptop", 23.46, (12, 0), 82, 128, 2.16, 896, 64, GEFORCE, A100, _LAPTOP),
    _row("RTX 5060", 7.53, (12, 0), 30, 128, 2.497, 448, 32, GEFORCE, A100, _GEFORCE),
    _row("RTX 5060 Ti 8GB", 7.53, (12, 0), 36, 128, 2.572, 448, 32, GEFORCE, A100, _GEFORCE),
    _row("RTX 5060 Ti 16GB", 15.47, (12, 0), 36, 128, 2.572, 448, 32, GEFORCE, A100, _GEFORCE),
    _row("RTX 5070", 11.49, (12, 0), 48, 128, 2.512, 672, 48, GEFORCE, A100, _BLACKWELL),
    _row("RTX 5070 Ti", 15.47, (12, 0), 70, 128, 2.452, 896, 48, GEFORCE, A100, _BLACKWELL),
    _row("RTX 5080", 15.47, (12, 0), 84, 128, 2.617, 960, 64, GEFORCE, A100, _BLACKWELL),
    _row("RTX 5090", 31.36, (12, 0), 170, 128, 2.407, 1792, 96, GEFORCE, A100, _BLACKWELL),
    _row("P4", 7.43, (6, 1), 20, 128, 1.063, 192, 2, 0, "P4", "NVIDIA Tesla P4 data sheet"),
    _row("P40", 22.38, (6, 1), 30, 128, 1.531, 346, 3, 0, "P4", "NVIDIA Tesla P40 data sheet"),
    _row("T4", 14.56, (7, 5), 40, 64, 1.59, 320, 4, 65, T4, "NVIDIA T4 data sheet; " + _TURING),
    _row("T4G", 14.56, (7, 5), 40, 64, 1.59, 320, 4, 65,
        T4, "NVIDIA T4 data sheet: the same chip, in Amazon's Arm machines"),
    _row("P100", 15.89, (6, 0), 56, 64, 1.303, 732, 4, 18.7,
        P100, "NVIDIA Tesla P100 PCIe data sheet; " + _PASCAL),
    _row("V100-16GB", 15.77, (7, 0), 80, 64, 1.38, 900, 6, 112, V100, _VOLTA),
    _row("V100-32GB", 31.74, (7, 0), 80, 64, 1.38, 900, 6, 112, V100, _VOLTA),
    _row("V100S", 31.74, (7, 0), 80, 64, 1.597, 1134, 6, 130, V100, "NVIDIA V100S data sheet"),
    _row("A2", 14.50, (8, 6), 10, 128, 1.77, 200, 2, FULL, A100, "NVIDIA A2 data sheet"),
    _row("A10", 21.99, (8, 6), 72, 128, 1.695, 600, 6, 125, A100, "NVIDIA A10 data sheet"),
    _row("A10G", 22.04, (8, 6), 72, 128, 1.71, 600, 6, 70,
        A100, "NVIDIA A10G data sheet (as Amazon publishes it)"),
    _row("A16", 14.50, (8, 6), 10, 128, 1.755, 200, 2, FULL,
        A100, "NVIDIA A16 data sheet: one of its four GPUs"),
    _row("A30", 23.50, (8, 0), 56, 64, 1.44, 933, 24, 165, A100, "NVIDIA A30 data sheet", tf32=82),
    _row("RTX A2000 6GB", 5.79, (8, 6), 26, 128, 1.2, 288, 3, FULL, A100, _RTX_A),
    _row("RTX A2000 12GB", 11.75, (8, 6), 26, 128, 1.2, 288, 3, FULL, A100, _RTX_A),
    _row("RTX A4500", 19.60, (8, 6), 56, 128, 1.65, 640, 5, FULL, A100, _RTX_A),
    _row("RTX A5500", 23.60, (8, 6), 80, 128, 1.665, 768, 6, FULL, A100, _RTX_A),
    _row("A40", 44.35, (8, 6), 84, 128, 1.74, 696, 6, 149.7, A100, "NVIDIA A40 data sheet"),
    _row("RTX A4000", 15.74, (8, 6), 48, 128, 1.56, 448, 4, FULL,
        A100, "NVIDIA RTX A4000 data sheet"),
    _row("RTX A5000", 23.69, (8, 6), 64, 128, 1.695, 768, 6, FULL,
        A100, "NVIDIA RTX A5000 data sheet"),
    _row("RTX A6000", 47.54, (8, 6), 84, 128, 1.80, 768, 6, FULL,
        A100, "NVIDIA RTX A6000 data sheet; " + _GA102),
    _row("RTX 4500 Ada", 23.50, (8, 9), 60, 128, 2.58, 432, 48, FULL,
        A100, "NVIDIA RTX 4500 Ada Generation data sheet"),
    _row("RTX 6000 Ada", 47.50, (8, 9), 142, 128, 2.505, 960, 96, FULL,
        A100, "NVIDIA RTX 6000 Ada Generation data sheet; " + _ADA),
    _row("L4", 22.03, (8, 9), 58, 128, 2.04, 300, 48, 121,
        T4, "NVIDIA L4 data sheet; " + _ADA, tf32=60),
    _row("L40", 44.39, (8, 9), 142, 128, 2.49, 864, 96, 181.05, A100, "NVIDIA L40 data sheet"),
    _row("L40S", 44.39, (8, 9), 142, 128, 2.52, 864, 96, 362.05, A100, "NVIDIA L40S data sheet"),
    _row("L20", 44.39, (8, 9), 92, 128, 2.52, 864, 96, GEFORCE, A100, "NVIDIA L20 data sheet"),
    _row("A100-40GB", 39.39, (8, 0), 108, 64, 1.41, 1555, 40, 312, A100, _AMPERE),
    _row("A100-80GB", 79.14, (8, 0), 108, 64, 1.41, 2039, 40, 312, A100, _AMPERE),
    _row("A100-80GB-PCIe", 79.14, (8, 0), 108, 64, 1.41, 1935, 40, 312, A100, _AMPERE),
    _row("A800-40GB", 39.39, (8, 0), 108, 64, 1.41, 1555, 40, 312, A100, _EXPORT),
    _row("A800-80GB", 79.14, (8, 0), 108, 64, 1.41, 2039, 40, 312, A100, _EXPORT),
    _row("A800-80GB-PCIe", 79.14, (8, 0), 108, 64, 1.41, 1935, 40, 312, A100, _EXPORT),
    _row("H100", 79.10, (9, 0), 132, 128, 1.98, 3352, 50, 989.4, A100, _HOPPER, watts=700),
    _row("H100-PCIe", 79.10, (9, 0), 114, 128, 1.755, 2039, 50, 756, A100, _HOPPER, watts=350),
    _row("H100 NVL", 93.00, (9, 0), 132, 128, 1.785, 3900, 50, 835.5, A100, _HOPPER, watts=400),
    _row("H800", 79.10, (9, 0), 132, 128, 1.98, 3352, 50, 989.4, A100, _EXPORT, watts=700),
    _row("H800-PCIe", 79.10, (9, 0), 114, 128, 1.755, 2039, 50, 756, A100, _EXPORT, watts=350),
    _row("H200", 139.80, (9, 0), 132, 128, 1.98, 4800, 50, 989.4,
        A100, "NVIDIA H200 Tensor Core GPU data sheet", watts=700, rates=H200),
    _row("H200 NVL", 139.80, (9, 0), 132, 128, 1.785, 4800, 50, 835.5,
        A100, "NVIDIA H200 Tensor Core GPU data sheet", watts=600),
    _row("GH200", 94.50, (9, 0), 132, 128, 1.98, 4000, 50, 989.4,
        A100, "NVIDIA GH200 Grace Hopper Superchip data sheet, 96 GB of HBM3"),
    _row("B200", 178.35, (10, 0), 148, 128, 1.965, 7700, 126, 2250,
        A100, "NVIDIA HGX B200 data sheet"),
    _row("RTX PRO 6000", 94.97, (12, 0), 188, 128, 2.617, 1792, 128, FULL,
        A100, "NVIDIA RTX PRO Blackwell GPU Architecture, appendix A"),
    *(_memory(*row) for row in _MEMORY_ALONE),
)
# fmt: on
KNOWN = {row.gpu.name: row.gpu for row in _TABLE}
SPECS = MappingProxyType({row.specs.name: row.specs for row in _TABLE if row.specs})
AMD = frozenset(name for name in KNOWN if name.startswith("MI"))
# Those that tables and answers go through: one of each size that is common. All others are planned
# for by name.
_COMMON = (
    "GTX 1650, RTX 4060 Laptop, RTX 3060, T4, P100, V100-16GB, L4, RTX 3090, RTX 4090, V100-32GB, "
    "A100-40GB, A100-80GB, H100, H200"
)
GPUS = {name: KNOWN[name] for name in _COMMON.split(", ")}
