"""GPUs as data for timing, by name or described by one's own figures of a data sheet."""

from __future__ import annotations

from tight_fit.checks import PRECISIONS, of_type, one_of, real, shown, whole
from tight_fit.gpus.names import SIZE, find, matches
from tight_fit.gpus.table import AMD, ARITHMETICS, GPU, KNOWN, MEASURED, SPECS, GpuSpecs

__all__ = ["ARITHMETICS", "MEASURED", "SPECS", "GpuSpecs"]


def find_gpu(gpu: str | GPU | GpuSpecs) -> GpuSpecs:
    """The GPU of that name in any spelling, or of the name of a `GPU`.

    Raises ValueError for an unknown name, which names the nearest, and for a GPU whose speed is not
    known; TypeError for anything but a name, a `GPU` or a `GpuSpecs`.
    """
    if isinstance(gpu, GpuSpecs):
        return gpu
    if isinstance(gpu, GPU):
        gpu = gpu.name
    if not isinstance(gpu, str):
        raise TypeError(f"gpu={shown(gpu)} must be a name, a GPU or a GpuSpecs.")
    if gpu in SPECS:
        return SPECS[gpu]
    found = find(gpu)
    if found.name in SPECS:
        return SPECS[found.name]
    raise ValueError(no_speed(found))


def no_speed(gpu: GPU) -> str:
    """Why no time is planned for a GPU that is not in `SPECS`, in one sentence."""
    if gpu.name in AMD:
        return f"time is not known for AMD, and of the {gpu.name} the memory alone is planned."
    if SIZE.fullmatch(gpu.name.lower()):
        return "a size says nothing of a GPU's speed: name the GPU (--list-gpus)."
    if gpu.name in KNOWN:
        return f"of the {gpu.name}, whose speed is not known, the memory alone is planned."
    return f"the speed of the {gpu.name} is not known: name a GPU of the list (--list-gpus)."


def of_device(name: str) -> GpuSpecs | None:
    """The GPU that a driver names, as "Tesla T4" or "NVIDIA A100-SXM4-40GB"; None if not known."""
    return next((SPECS[gpu.name] for gpu in matches(name) if gpu.name in SPECS), None)


def has_arithmetic(precision: str, gpu: str | GPU | GpuSpecs) -> bool:
    """Whether a step of this precision can run on a GPU as it is asked for.

    A step in "tf32" runs in fp32 where there is no TF32. Raises what `find_gpu` raises.
    """
    one_of("precision", precision, PRECISIONS)
    return precision == "tf32" or bool(getattr(find_gpu(gpu), precision))


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
