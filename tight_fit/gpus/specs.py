"""GPUs as data: what a data sheet says of each, and whose measurements stand for it.

Peaks are dense, without sparsity, with sums kept in fp32: what PyTorch's products use. GeForce GPUs
halve their tensor cores' rate for such sums. fp32 is lanes × 2 × boost clock, which the tests
check.
"""

from __future__ import annotations

import difflib
import re
from types import MappingProxyType
from typing import NamedTuple

from tight_fit.checks import PRECISIONS, of_type, one_of, real, shown, whole
from tight_fit.gpus import GPU

ARITHMETICS = ("fp32", "tf32", "fp16", "bf16")
MEASURED = (
    "T4",
    "P4",
    "P100",
    "V100-32GB",
    "A100-40GB",
)  # the GPUs whose kernel times are fitted (constants.json)


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

    @property
    def measured(self) -> bool:
        """Whether kernels of this very GPU were fitted."""
        return self.like == self.name


_TURING = "NVIDIA Turing GPU Architecture, WP-09183-001"
_PASCAL = "NVIDIA Tesla P100, WP-08019-001"
_VOLTA = "NVIDIA V100 data sheet (January 2020) and NVIDIA Tesla V100, WP-08608-001"
_AMPERE = "NVIDIA A100 data sheet (June 2021) and NVIDIA A100 Tensor Core GPU Architecture"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture V2, appendix A"
_ADA = "NVIDIA Ada GPU Architecture V2, appendix A"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet and NVIDIA H100 Tensor Core GPU Architecture"

# fmt: off
_TABLE = (
    # name, multiprocessors, lanes, clock, bandwidth, level-2 cache, tf32, fp16, bf16,
    #     the measured GPU that it is like, source
    GpuSpecs("GTX 1650", 14, 64, 1.665e9, 128e9, 1 << 20, 0, 2 * 14 * 64 * 2 * 1.665e9, 0,
        "T4", "GeForce GTX 1650 specifications"),
    GpuSpecs("P4", 20, 128, 1.063e9, 192e9, 2 << 20, 0, 0, 0,
        "P4", "NVIDIA Tesla P4 data sheet"),
    GpuSpecs("T4", 40, 64, 1.59e9, 320e9, 4 << 20, 0, 65e12, 0,
        "T4", "NVIDIA T4 data sheet; " + _TURING),
    GpuSpecs("P100", 56, 64, 1.303e9, 732e9, 4 << 20, 0, 18.7e12, 0,
        "P100", "NVIDIA Tesla P100 PCIe data sheet; " + _PASCAL),
    GpuSpecs("V100-16GB", 80, 64, 1.38e9, 900e9, 6 << 20, 0, 112e12, 0,
        "V100-32GB", _VOLTA),
    GpuSpecs("V100-32GB", 80, 64, 1.38e9, 900e9, 6 << 20, 0, 112e12, 0,
        "V100-32GB", _VOLTA),
    GpuSpecs("A100-40GB", 108, 64, 1.41e9, 1555e9, 40 << 20, 156e12, 312e12, 312e12,
        "A100-40GB", _AMPERE),
    GpuSpecs("A100-80GB", 108, 64, 1.41e9, 2039e9, 40 << 20, 156e12, 312e12, 312e12,
        "A100-40GB", _AMPERE),
    GpuSpecs("A100-80GB-PCIe", 108, 64, 1.41e9, 1935e9, 40 << 20, 156e12, 312e12, 312e12,
        "A100-40GB", _AMPERE),
    GpuSpecs("RTX 3060", 28, 128, 1.777e9, 360e9, 3 << 20, 12.7e12, 25.5e12, 25.5e12,
        "A100-40GB", _GA102),
    GpuSpecs("RTX 3090", 82, 128, 1.695e9, 936e9, 6 << 20, 35.6e12, 71e12, 71e12,
        "A100-40GB", _GA102),
    GpuSpecs("L4", 58, 128, 2.04e9, 300e9, 48 << 20, 60e12, 121e12, 121e12,
        "T4", "NVIDIA L4 data sheet; " + _ADA),
    GpuSpecs("RTX 4060 Laptop", 24, 128, 1.89e9, 256e9, 32 << 20, 11.6e12, 23.2e12, 23.2e12,
        "A100-40GB", _ADA),
    GpuSpecs("RTX 4090", 128, 128, 2.52e9, 1008e9, 72 << 20, 82.6e12, 165.2e12, 165.2e12,
        "A100-40GB", _ADA),
    GpuSpecs("H100", 132, 128, 1.98e9, 3352e9, 50 << 20, 494.7e12, 989.4e12, 989.4e12,
        "A100-40GB", _HOPPER),
    GpuSpecs("H100-PCIe", 114, 128, 1.755e9, 2039e9, 50 << 20, 378e12, 756e12, 756e12,
        "A100-40GB", _HOPPER),
    GpuSpecs("H200", 132, 128, 1.98e9, 4800e9, 50 << 20, 494.7e12, 989.4e12, 989.4e12,
        "A100-40GB", "NVIDIA H200 Tensor Core GPU data sheet"),
)
# fmt: on
SPECS = MappingProxyType({gpu.name: gpu for gpu in _TABLE})


def find_gpu(gpu: str | GPU | GpuSpecs) -> GpuSpecs:
    """The GPU of that name, or of the name of a `GPU`.

    Raises ValueError that names the nearest and says how to describe one's own, TypeError for
    anything but a name, a `GPU` or a `GpuSpecs`.
    """
    if isinstance(gpu, GpuSpecs):
        return gpu
    if isinstance(gpu, GPU):
        gpu = gpu.name
    if not isinstance(gpu, str):
        raise TypeError(f"gpu={shown(gpu)} must be a name, a GPU or a GpuSpecs.")
    if gpu in SPECS:
        return SPECS[gpu]
    plain = {_plain(name): name for name in SPECS}
    asked = _plain(gpu)
    near = (
        [name for name in plain if asked and (asked in name or name in asked)]
        or difflib.get_close_matches(asked, plain, 1, 0)
        or list(plain)
    )
    raise ValueError(
        f"gpu={shown(gpu)} is not known: the nearest is {plain[near[0]]!r}, or describe your own, "
        "described(name, sms=..., lanes=..., clock=..., bandwidth=..., l2=..., fp16=...)."
    )


MAKERS = re.compile(r"nvidia|geforce|tesla|gpu|sxm\d?|[^a-z0-9]")
REST = re.compile(r"(pcie|\d+gb|hbm\d\w?)*")  # what may follow a GPU's name in that of its driver


def of_device(name: str) -> GpuSpecs | None:
    """The GPU that a driver names, as "Tesla T4" or "NVIDIA A100-SXM4-40GB"; None if not known."""
    plain = MAKERS.sub("", name.lower())
    for written in (plain, plain.replace("pcie", "")):  # a V100 is named so, and needs no PCIe
        fitting = [
            known
            for known in SPECS
            if written.startswith(_plain(known)) and REST.fullmatch(written[len(_plain(known)) :])
        ]
        if fitting:
            return SPECS[max(fitting, key=len)]
    return None


def has_arithmetic(precision: str, gpu: str | GPU | GpuSpecs) -> bool:
    """Whether a step of this precision can run on a GPU as it is asked for.

    A step in "tf32" runs in fp32 where there is no TF32. Raises what `find_gpu` raises.
    """
    one_of("precision", precision, PRECISIONS)
    return precision == "tf32" or bool(getattr(find_gpu(gpu), precision))


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


# What a GPU of one's own may have, so that gigabytes are not taken for bytes: least, most, unit.
BOUNDS = {
    "sms": (1, 10_000, "multiprocessors"),
    "lanes": (1, 4096, "multiply-adds a clock"),
    "clock": (1e8, 1e10, "Hz"),
    "bandwidth": (1e9, 1e15, "bytes/s"),
    "l2": (2**14, 2**34, "bytes"),
    "peak": (1e10, 1e18, "FLOP/s"),
}


def described(
    name: str,
    sms: int,
    lanes: int,
    clock: float,
    bandwidth: float,
    l2: int,
    tf32: float = 0.0,
    fp16: float = 0.0,
    bf16: float = 0.0,
    like: str = "A100-40GB",
) -> GpuSpecs:
    """A GPU of one's own from a few figures of its data sheet, in the units of `GpuSpecs`.

    Its efficiencies are those of `like`.

    Raises ValueError for a figure that no GPU has or a `like` that was not measured, TypeError
    for one that is no number.
    """
    figures = {
        "sms": sms,
        "lanes": lanes,
        "clock": clock,
        "bandwidth": bandwidth,
        "l2": l2,
        "tf32": tf32,
        "fp16": fp16,
        "bf16": bf16,
    }
    of_type("name", name, str)
    for word, value in figures.items():
        absent = word in ("tf32", "fp16", "bf16")  # 0 says that the GPU has no such arithmetic
        real(word, value, above=None if absent else 0, at_least=0)
        if word in ("sms", "lanes"):
            whole(word, value, 1)
        least, most, unit = BOUNDS["peak" if absent else word]
        if value and not least <= value <= most:
            raise ValueError(
                f"{word}={shown(value)} is no figure of a GPU, which has {least:g} to {most:g} "
                f"{unit}: mind the unit."
            )
    if not isinstance(like, str) or like not in MEASURED:
        raise ValueError(f"like={shown(like)} was not measured: use one of {', '.join(MEASURED)}.")
    source = "described by its user"
    return GpuSpecs(name, sms, lanes, clock, bandwidth, l2, tf32, fp16, bf16, like, source)
