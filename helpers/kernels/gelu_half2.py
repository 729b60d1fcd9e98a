"""GELU in fp16 with half2, two values an instruction, compiled while the program runs; its fp32 twin; and the same
arithmetic on a CPU, rounded after each operation.

The formula is the tanh form (Hendrycks and Gimpel 2016), gelu(x) = h tanh(x (a + b x²)) + h with h = x/2, a = √(2/π) and
b = 0.044715 a. The kernels are CUDA C with the instructions named (PTX ISA, `fma.rn.f16x2`, `tanh.approx.f16x2`), so that
NVRTC, which PyTorch ships, compiles them without a compiler, without headers and without a GPU.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

KINDS = ("half2", "fp32")
LEAST = (7, 5)  # the first capability with tanh.approx.f16x2
THREADS = 256  # a block
TOGETHER = 8  # values a thread: 16 bytes, the widest load there is
A = math.sqrt(2 / math.pi)
B = 0.044715 * A


def _pair(value: float) -> str:
    """Twice the same fp16 value in one 32-bit register, as CUDA C."""
    bits = int(np.float16(value).view(np.uint16))
    return f"0x{bits << 16 | bits:08x}u"


INSTRUCTIONS = r"""
__device__ u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ u32 fma2(u32 a, u32 b, u32 c)
{ u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
__device__ u32 tanh2(u32 a) { u32 d; asm("tanh.approx.f16x2 %0, %1;" : "=r"(d) : "r"(a)); return d; }
__device__ float wide(u16 a) { float d; asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(a)); return d; }
__device__ u16 narrow(float a) { u16 d; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(a)); return d; }
__device__ float mul1(float a, float b) { float d; asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
__device__ float fma1(float a, float b, float c)
{ float d; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c)); return d; }
__device__ float tanh1(float a) { float d; asm("tanh.approx.f32 %0, %1;" : "=f"(d) : "f"(a)); return d; }
"""
ARITHMETIC = r"""
__device__ u32 gelu_half2(u32 x, int repeats)  // x: two fp16 values
{
    for (int i = 0; i < repeats; i++) {
        u32 u = mul2(x, fma2(mul2(x, x), B2, A2)), h = mul2(x, HALF2);
        x = fma2(h, tanh2(u), h);
    }
    return x;
}
__device__ float gelu_one(float x, int repeats)
{
    for (int i = 0; i < repeats; i++) {
        float u = mul1(x, fma1(mul1(x, x), B1, A1)), h = mul1(x, 0.5f);
        x = fma1(h, tanh1(u), h);
    }
    return x;
}
__device__ u32 gelu_fp32(u32 x, int repeats)  // the same two values, one after the other
{
    u32 low = narrow(gelu_one(wide((u16)x), repeats)), high = narrow(gelu_one(wide((u16)(x >> 16)), repeats));
    return high << 16 | low;
}
"""
KERNEL = r"""
extern "C" __global__ void kernel_KIND(const u16* x, u16* y, long long count, int repeats)
{
    long long place = (long long)blockIdx.x * blockDim.x + threadIdx.x, first = 8 * place;
    if (first + 8 <= count) {
        uint4 v = ((const uint4*)x)[place];
        v.x = gelu_KIND(v.x, repeats); v.y = gelu_KIND(v.y, repeats);
        v.z = gelu_KIND(v.z, repeats); v.w = gelu_KIND(v.w, repeats);
        ((uint4*)y)[place] = v;
    } else {
        for (long long i = first; i < count; i++) y[i] = (u16)gelu_KIND(x[i], repeats);
    }
}
"""
CONSTANTS = f"""typedef unsigned int u32; typedef unsigned short u16;
#define A1 {A!r}f
#define B1 {B!r}f
#define A2 {_pair(A)}
#define B2 {_pair(B)}
#define HALF2 {_pair(0.5)}
"""


def source(instructions: str = INSTRUCTIONS) -> str:
    """The CUDA C of both kernels."""
    return (
        CONSTANTS
        + instructions
        + ARITHMETIC
        + "".join(KERNEL.replace("KIND", kind) for kind in KINDS)
    )


def emulate(x: np.ndarray) -> np.ndarray:
    """The half2 kernel's arithmetic on a CPU: float16 in and out, each operation rounded once to fp16.

    A fused multiply-add is exact in float64 before its one rounding. tanh is the true one, rounded; the GPU's is off by
    up to 2^-10.987 (PTX ISA). Raises TypeError for another dtype.
    """
    if not isinstance(x, np.ndarray) or x.dtype != np.float16:
        raise TypeError("emulate takes a NumPy array of float16: convert it first.")
    half, a, b = np.float16(0.5), np.float16(A), np.float16(B)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        u = x * _fma(x * x, b, a)
        h = x * half
        return _fma(h, np.tanh(u.astype(np.float64)).astype(np.float16), h)


def _fma(a, b, c) -> np.ndarray:
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float16)


def available(device: int | None = None) -> tuple[bool, str]:
    """(whether the kernels can run here, one line of why not)."""
    if not torch.cuda.is_available():
        return False, "no GPU found"
    if torch.version.cuda is None:
        return False, "this PyTorch is not built for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < LEAST:
        return (
            False,
            f"{torch.cuda.get_device_name(device)} has no tanh for two fp16 values: it needs capability 7.5, a T4 or newer",
        )
    try:
        _nvrtc()
    except OSError as error:
        return False, str(error)
    return True, ""


def gelu(x: torch.Tensor, kind: str = "half2", repeats: int = 1) -> torch.Tensor:
    """GELU of a float16 CUDA tensor, by the kernel `kind`, "half2" or "fp32"; no gradient. Same shape and dtype.

    repeats  apply it so many times in registers, to weigh arithmetic against memory
    Raises ValueError (kind, repeats), TypeError (a tensor of another dtype or device), RuntimeError (no such GPU).
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known: use one of {', '.join(KINDS)}.")
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats={repeats!r} must be a whole number of at least 1.")
    if x.dtype != torch.float16 or not x.is_cuda:
        raise TypeError(
            f"The kernels take a float16 tensor on a GPU, not {x.dtype} on {x.device.type}."
        )
    with torch.cuda.device(x.device):
        usable, why = available()
        if not usable:
            raise RuntimeError(f"The half2 kernels cannot run here: {why}.")
        x = x.detach().contiguous()
        x = (
            x if x.data_ptr() % 16 == 0 else x.clone()
        )  # 16 bytes a load need an address they divide
        y = torch.empty_like(x)
        blocks = -(-x.numel() // (THREADS * TOGETHER))
        if blocks:
            values = (
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_void_p(y.data_ptr()),
                ctypes.c_longlong(x.numel()),
                ctypes.c_int(repeats),
            )
            addresses = (ctypes.c_void_p * len(values))(
                *(ctypes.addressof(value) for value in values)
            )
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            _driver(
                "cuLaunchKernel",
                _function(kind, torch.cuda.current_device()),
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                addresses,
                None,
            )
    return y


@cache
def build(capability: str, form: str = "cubin") -> bytes:
    """Both kernels for a capability such as "75", as machine code ("cubin") or as assembly text ("ptx"). Needs no GPU.

    Raises OSError where NVRTC is not installed, RuntimeError with its log where it refuses.
    """
    library, program, length = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    kind, getter = ("sm", "CUBIN") if form == "cubin" else ("compute", "PTX")
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={kind}_{capability}".encode())
    if library.nvrtcCreateProgram(
        ctypes.byref(program), source().encode(), b"half2.cu", 0, None, None
    ):
        raise RuntimeError("NVRTC could not make a program.")
    try:
        if library.nvrtcCompileProgram(program, 1, options):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(length))
            log = ctypes.create_string_buffer(length.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(
                f"NVRTC does not compile for capability {capability}: {log.value.decode().strip()}"
            )
        getattr(library, f"nvrtcGet{getter}Size")(program, ctypes.byref(length))
        image = ctypes.create_string_buffer(length.value)
        getattr(library, f"nvrtcGet{getter}")(program, image)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC as PyTorch brings it, else the system's. Raises OSError in one sentence."""
    major = (torch.version.cuda or "").split(".")[0]
    packages = Path(torch.__file__).parent.parent
    places = [
        *packages.glob("nvidia/*/lib/libnvrtc.so.*"),
        *packages.glob("nvidia/*/bin/**/nvrtc64_*_0.dll"),
        *packages.glob("torch/lib/libnvrtc-????????.so*"),
        *packages.glob("torch/lib/nvrtc64_*_0.dll"),
    ]
    names = [str(place) for place in places] + [
        f"libnvrtc.so.{major}",
        "libnvrtc.so",
        f"nvrtc64_{major}0_0.dll",
    ]
    for folder in filter(
        None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), sys.prefix)
    ):
        names += [str(Path(folder) / part / "libnvrtc.so") for part in ("lib64", "lib")]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("NVRTC is not installed: it comes with PyTorch's builds for CUDA")


@cache
def _function(kind: str, device: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _driver("cuModuleLoadData", ctypes.byref(module), build(f"{major}{minor}"))
    _driver("cuModuleGetFunction", ctypes.byref(function), module, f"kernel_{kind}".encode())
    return function


def _driver(call: str, *arguments) -> None:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    status = getattr(library, call)(*arguments)
    if status:
        raise RuntimeError(f"The CUDA driver's {call} failed with code {status}.")
