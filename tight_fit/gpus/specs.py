"""GPUs as data for timing, by name or described by one's own figures of a data sheet."""

from __future__ import annotations

from tight_fit.checks import PRECISIONS, one_of, shown
from tight_fit.gpus import calibration
from tight_fit.gpus.names import SIZE, find, matches
from tight_fit.gpus.own import described
from tight_fit.gpus.table import AMD, ARITHMETICS, GPU, KNOWN, MEASURED, SPECS, GpuSpecs

__all__ = ["ARITHMETICS", "MEASURED", "SPECS", "GpuSpecs", "described"]


def find_gpu(gpu: str | GPU | GpuSpecs) -> GpuSpecs:
    """The GPU of that name in any spelling, or of the name of a `GPU`; as it was measured, where
    `tight-fit calibrate` did so.

    Raises ValueError for an unknown name, which names the nearest, and for a GPU whose speed is not
    known; TypeError for anything but a name, a `GPU` or a `GpuSpecs`.
    """
    if isinstance(gpu, GpuSpecs):
        return gpu
    if isinstance(gpu, GPU):
        gpu = gpu.name
    if not isinstance(gpu, str):
        raise TypeError(f"gpu={shown(gpu)} must be a name, a GPU or a GpuSpecs.")
    found = speed_of(gpu)
    if found is not None:
        return found
    named = find(gpu)
    found = speed_of(named.name)
    if found is not None:
        return found
    raise ValueError(no_speed(named))


def speed_of(name: str) -> GpuSpecs | None:
    """The figures of a GPU, named as plans name it: measured ones where there are any
    (`gpus.calibration`), else the table's; None where its speed is not known.

    Raises ValueError or OSError where the file of a calibration cannot be used.
    """
    return calibration.of_gpu(name) or SPECS.get(name)


def no_speed(gpu: GPU) -> str:
    """Why no time is planned for a GPU that is not in `SPECS`, in one sentence."""
    if gpu.name in AMD:
        return f"time is not known for AMD, and of the {gpu.name} the memory alone is planned."
    if SIZE.fullmatch(gpu.name.lower()):
        return "a size says nothing of a GPU's speed: name the GPU (--list-gpus)."
    if gpu.name in KNOWN:
        return f"of the {gpu.name}, whose speed is not known, the memory alone is planned."
    return f"the speed of the {gpu.name} is not known: name a GPU of the list (--list-gpus)."


def check_fp8(float8: str | None, gpu: GPU) -> None:
    """Raises ValueError, in one sentence, where a step in float8 is asked of a GPU without FP8.

    A size says nothing of it, and a machine without a GPU computes anything.
    """
    sized = SIZE.fullmatch(gpu.name.lower()) or gpu.capability == (0, 0)
    if float8 is not None and not gpu.fp8 and not sized:
        raise ValueError(
            f"The {gpu.name} has no products in FP8, which NVIDIA's GPUs have from Ada on (compute "
            "capability 8.9, such as L4, RTX 4090 and H100): leave float8 out."
        )


def of_device(name: str) -> GpuSpecs | None:
    """The GPU that a driver names, as "Tesla T4" or "NVIDIA A100-SXM4-40GB"; None if not known."""
    return next((SPECS[gpu.name] for gpu in matches(name) if gpu.name in SPECS), None)


def has_arithmetic(precision: str, gpu: str | GPU | GpuSpecs) -> bool:
    """Whether a step of this precision can run on a GPU as it is asked for.

    A step in "tf32" runs in fp32 where there is no TF32. Raises what `find_gpu` raises.
    """
    one_of("precision", precision, PRECISIONS)
    return precision == "tf32" or bool(getattr(find_gpu(gpu), precision))
