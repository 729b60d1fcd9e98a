"""A GPU of one's own, described by the figures of its data sheet."""

from __future__ import annotations

from tight_fit.checks import of_type, real, shown, whole
from tight_fit.gpus.table import MEASURED, GpuSpecs

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
    fp8: float = 0.0,
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
        "fp8": fp8,
    }
    of_type("name", name, str)
    for word, value in figures.items():
        absent = word in ("tf32", "fp16", "bf16", "fp8")  # 0: it has no such arithmetic
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
    known = sms, lanes, clock, bandwidth, l2, tf32, fp16, bf16
    return GpuSpecs(name, *known, like, source, fp8=fp8)
