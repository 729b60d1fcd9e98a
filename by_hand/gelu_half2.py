"""GELU in fp16 with half2: two values per instruction, in a kernel compiled while the program runs.

Beside it stand the same kernel in fp32, one value per instruction, and the arithmetic of the half2
kernel on a CPU, rounded after each operation.

The formula is the tanh form of GELU (Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415):
gelu(x) = h tanh(x (a + b x^2)) + h with h = x / 2, a = sqrt(2 / pi) and b = 0.044715 a. The kernels
are CUDA C that names its instructions (PTX ISA: `fma.rn.f16x2`, `tanh.approx.f16x2`), so that NVRTC
compiles them without headers (see nvrtc.py); PyTorch loads and launches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from by_hand import nvrtc
from tight_fit import torch_private
from tight_fit.checks import one_of, whole

KINDS = ("half2", "fp32")
LEAST = (7, 5)  # the first compute capability with tanh.approx.f16x2
THREADS = 256  # per block
TOGETHER = 8  # values per thread: 16 bytes, the largest load there is
LAUNCH = 2**30  # values per launch, at most: the kernels count them with 32 bits
A = math.sqrt(2 / math.pi)
B = 0.044715 * A


def _pair(value: float) -> str:
    """The same fp16 value twice in one 32-bit register, as CUDA C."""
    bits = int(np.float16(value).view(np.uint16))
    return f"0x{bits << 16 | bits:08x}u"


# One function per line, as notebook 04 prints them.
INSTRUCTIONS = (
    "__device__ u32 mul2(u32 a, u32 b) "
    '{ u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }\n'
    "__device__ u32 fma2(u32 a, u32 b, u32 c) "
    '{ u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }\n'
    "__device__ u32 tanh2(u32 a) "
    '{ u32 d; asm("tanh.approx.f16x2 %0, %1;" : "=r"(d) : "r"(a)); return d; }\n'
    "__device__ float wide(u16 a) "
    '{ float d; asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(a)); return d; }\n'
    "__device__ u16 narrow(float a) "
    '{ u16 d; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(a)); return d; }\n'
    "__device__ float mul1(float a, float b) "
    '{ float d; asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }\n'
    "__device__ float fma1(float a, float b, float c) "
    '{ float d; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c)); return d; }\n'
    "__device__ float tanh1(float a) "
    '{ float d; asm("tanh.approx.f32 %0, %1;" : "=f"(d) : "f"(a)); return d; }\n'
)
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
    u32 low = narrow(gelu_one(wide((u16)x), repeats));
    u32 high = narrow(gelu_one(wide((u16)(x >> 16)), repeats));
    return high << 16 | low;
}
"""
KERNEL = r"""
extern "C" __global__ void kernel_KIND(const u16* x, u16* y, int count, int repeats)
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
    """The CUDA C of both kernels, `kernel_half2` and `kernel_fp32`, upon these instructions."""
    kernels = [KERNEL.replace("KIND", kind) for kind in KINDS]
    return "".join([CONSTANTS, instructions, ARITHMETIC, *kernels])


def emulate(x: np.ndarray) -> np.ndarray:
    """The arithmetic of the half2 kernel on a CPU: float16 in, float16 of the same shape out.

    Each operation is rounded once to fp16; a fused multiply-add is exact in float64 before its one
    rounding. tanh is the exact one, rounded, whereas that of a GPU has an error of up to 2^-10.987
    (PTX ISA). Raises TypeError for another dtype.
    """
    if not isinstance(x, np.ndarray) or x.dtype != np.float16:
        raise TypeError("emulate takes a NumPy array of float16: convert it first.")
    half, a, b = np.float16(0.5), np.float16(A), np.float16(B)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        u = x * _fma(x * x, b, a)
        h = x * half
        return _fma(h, np.tanh(u.astype(np.float64)).astype(np.float16), h)


def _fma(a, b, c) -> np.ndarray:
    return np.asarray(np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float16)


def available(device: int | None = None) -> tuple[bool, str]:
    """(whether the kernels can run on this GPU, one line that says why not)."""
    if not torch.cuda.is_available():
        return False, "no GPU found"
    if torch.version.cuda is None:
        return False, "this PyTorch is not built for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < LEAST:
        return False, (
            f"{torch.cuda.get_device_name(device)} has no tanh for two fp16 values: it needs "
            "capability 7.5, a T4 or newer"
        )
    try:
        nvrtc.library()
    except OSError as error:
        return False, str(error)
    return True, ""


def gelu(x: torch.Tensor, kind: str = "half2", repeats: int = 1) -> torch.Tensor:
    """GELU of a float16 tensor on a GPU, in its shape and dtype; without a gradient.

    kind     the kernel: "half2" or "fp32"
    repeats  how often it is applied, in registers, to weigh arithmetic against memory

    Raises ValueError for an unknown kind and fewer than 1 repeats, TypeError for repeats that are
    not whole and for a tensor of another dtype or device, RuntimeError for a GPU that cannot run
    the kernels.
    """
    one_of("kind", kind, KINDS)
    whole("repeats", repeats, 1)
    if x.dtype != torch.float16 or not x.is_cuda:
        raise TypeError(
            f"The kernels take a float16 tensor on a GPU, not {x.dtype} on {x.device.type}."
        )
    with torch.cuda.device(x.device):
        usable, why = available()
        if not usable:
            raise RuntimeError(f"The half2 kernels cannot run here: {why}.")
        x = x.detach().contiguous()
        x = x if x.data_ptr() % 16 == 0 else x.clone()  # loads of 16 bytes need aligned addresses
        y = torch.empty_like(x)
        _launch(_kernel(kind, torch.cuda.current_device()), x.view(-1), y.view(-1), repeats)
    return y


def _launch(kernel: Callable, x: torch.Tensor, y: torch.Tensor, repeats: int) -> None:
    """Run the kernel from x to y, (values,), in as many launches as their length needs."""
    for part, result in zip(x.split(LAUNCH), y.split(LAUNCH)):
        count = part.numel()
        if count:
            blocks = math.ceil(count / (THREADS * TOGETHER))
            kernel((blocks, 1, 1), (THREADS, 1, 1), [part, result, count, repeats])


@cache
def build(capability: str, form: str = "cubin") -> bytes:
    """Both kernels for a compute capability such as "75"; it needs no GPU.

    form  "cubin" for machine code, "ptx" for assembly text

    Raises OSError and RuntimeError as `nvrtc.compile_cuda` does.
    """
    return nvrtc.compile_cuda(source(), capability, form)


@cache
def _kernel(kind: str, device: int) -> Callable:
    """The kernel, loaded on this GPU, which must be the current one."""
    major, minor = torch.cuda.get_device_capability(device)
    return torch_private.load_cuda_kernel(build(f"{major}{minor}"), f"kernel_{kind}")
