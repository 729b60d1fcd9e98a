"""The GPUs that readers have: one row of table.csv says what a GPU holds, how fast it is, and where
that is from.

Memory is what PyTorch sees (`torch.cuda.get_device_properties(0).total_memory`, the "total
capacity" of its out-of-memory messages): less than the label, as ECC and the driver take a part.
Drivers differ by some tens of MiB. The figures are stated from public reports of such messages, and
none was read from a GPU. Where no such report is known, the row has the least that is seen of the
size on GPUs of its generation. Of some rows the memory alone is known surely: no time is planned.
The capability of AMD's GPUs is PyTorch's name of their kind.

The table has the units of data sheets: TFLOP/s for products, of which those in TF32 are stated
where they are not half of fp16's.

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

import csv
from pathlib import Path
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


# Operations a clock of a multiprocessor's tensor cores, with sums in fp32, where the table has a
# word for a GPU's products in fp16; "twice" is a multiprocessor without tensor cores: twice its 64
# multiply-adds in fp32.
PER_CLOCK = {"twice": 256, "GeForce": 512, "full": 1024}
HOPPER = 4096  # the same of Hopper, whose products' peaks are stated at another clock
HOPPER_HOLDS = 1.755  # GHz in fp32
# Forward and backward pass of 4,096 tokens together, by the figures 5 and 6 of FlashAttention-3's
# paper (Shah et al. 2024, arXiv 2407.08608): heads of 64, and of 128. There PyTorch takes cuDNN's
# kernels from release 2.11 on, before that those of FlashAttention-2.
CUDNN_ATTENTION, FLASH_2_ATTENTION = (0.42, 0.52), (0.30, 0.32)


def _gpu(row: dict[str, str]) -> GPU:
    major, minor = map(int, row["capability"].split("."))
    return GPU(row["name"], int(float(row["GiB"]) * GIB), (major, minor))


def _specs(row: dict[str, str], gpu: GPU) -> GpuSpecs:
    """The figures of a row whose speed is known."""
    sms, clock, fp16 = int(row["multiprocessors"]), float(row["GHz"]), row["fp16"]
    rate = sms * PER_CLOCK[fp16] * clock * 1e9 if fp16 in PER_CLOCK else float(fp16) * 1e12
    tf32 = float(row["tf32"]) * 1e12 if row["tf32"] else rate / 2
    specs = GpuSpecs(
        gpu.name,
        sms,
        int(row["lanes"]),
        clock * 1e9,
        float(row["GB/s"]) * 1e9,
        int(float(row["L2 MiB"]) * 2**20),
        tf32 if gpu.bf16 else 0,
        rate,
        rate if gpu.bf16 else 0,
        row["like"],
        row["source"],
        rates=MEASURED_RATES.get(gpu.name),
        fp8=2 * rate if gpu.fp8 else 0.0,
        watts=int(row["watts"] or 0),
    )
    if gpu.capability == (9, 0):
        held = min(clock, HOPPER_HOLDS) * 1e9
        specs = specs._replace(tensor_ops=HOPPER, sustained=held, attention=CUDNN_ATTENTION)
    return specs


MEASURED_RATES = {"H200": H200}
TABLE = Path(__file__).with_name("table.csv")
with open(TABLE, encoding="utf8", newline="") as _file:
    _ROWS = [(_gpu(row), row) for row in csv.DictReader(_file)]
KNOWN = {gpu.name: gpu for gpu, _ in _ROWS}
SPECS = MappingProxyType({gpu.name: _specs(row, gpu) for gpu, row in _ROWS if row["GHz"]})
AMD = frozenset(name for name in KNOWN if name.startswith("MI"))
# Those that tables and answers go through: one of each size that is common. All others are planned
# for by name.
_COMMON = (
    "GTX 1650, RTX 4060 Laptop, RTX 3060, T4, P100, V100-16GB, L4, RTX 3090, RTX 4090, V100-32GB, "
    "A100-40GB, A100-80GB, H100, H200"
)
GPUS = {name: KNOWN[name] for name in _COMMON.split(", ")}
