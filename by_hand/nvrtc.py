"""NVRTC, the compiler for CUDA C that PyTorch's builds for CUDA bring along, called through ctypes.

It needs no GPU, no C compiler and no CUDA toolkit. PyTorch can also compile CUDA C at run time
(`torch.cuda._compile_kernel`, from 2.8 on), but not for the readers of this course: it asks
`torch.utils.cpp_extension.include_paths` for the headers of a CUDA toolkit, whether or not the
source includes any, and raises OSError where no toolkit is installed. That is the usual case after
`pip install torch`. It also gives machine code only, while the tests read the PTX. What PyTorch
does after compilation, loading and launching, has no such limit and is used as it is
(`torch_private.load_cuda_kernel`).

Source: https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import torch


def compile_cuda(source: str, capability: str, form: str = "cubin") -> bytes:
    """Compile CUDA C for one compute capability, such as "75".

    form  "cubin" for machine code, "ptx" for assembly text

    Raises OSError where NVRTC is not installed, and RuntimeError with NVRTC's log where it refuses
    the source.
    """
    nvrtc = library()
    architecture, getter = ("sm", "CUBIN") if form == "cubin" else ("compute", "PTX")
    option = f"--gpu-architecture={architecture}_{capability}".encode()
    program = ctypes.c_void_p()
    name = b"kernels.cu"  # in NVRTC's messages
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name, 0, None, None):
        raise RuntimeError("NVRTC could not make a program.")
    try:
        if nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(option)):
            log = _text(nvrtc, "ProgramLog", program).decode().rstrip("\0").strip()
            raise RuntimeError(f"NVRTC does not compile for capability {capability}: {log}")
        return _text(nvrtc, getter, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    """What `nvrtcGet...` gives of a program: its "ProgramLog", "CUBIN" or "PTX"."""
    length = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(length))
    buffer = ctypes.create_string_buffer(length.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@cache
def library() -> ctypes.CDLL:
    """NVRTC as PyTorch brings it, else the system's. Raises OSError where there is none."""
    for name in _names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("NVRTC is not installed: it comes with PyTorch's builds for CUDA")


def _names() -> list[str]:
    """Where NVRTC may lie, on Linux and Windows, the most likely place first."""
    major = (torch.version.cuda or "").split(".")[0]
    packages = Path(torch.__file__).parent.parent
    names = [
        str(path)
        for pattern in (
            "nvidia/*/lib/libnvrtc.so.*",
            "nvidia/*/bin/**/nvrtc64_*_0.dll",
            "torch/lib/libnvrtc-????????.so*",
            "torch/lib/nvrtc64_*_0.dll",
        )
        for path in packages.glob(pattern)
    ]
    names += [f"libnvrtc.so.{major}", "libnvrtc.so", f"nvrtc64_{major}0_0.dll"]
    for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), sys.prefix):
        if folder:
            names += [str(Path(folder) / part / "libnvrtc.so") for part in ("lib64", "lib")]
    return names
