"""The GELU kernels, tested in four ways, each where it can be.

Their arithmetic emulated on a CPU, their source run as C, compiled by NVRTC, and run on a GPU.
"""

import shutil
import subprocess

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from by_hand import gelu_half2, nvrtc

EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16)
FINITE = EVERY[np.isfinite(EVERY)]
EXACT = F.gelu(torch.from_numpy(FINITE.astype(np.float64)), approximate="tanh").numpy()
SIZE = np.abs(FINITE.astype(np.float64))
EMULATED = SIZE * 2.0**-10.7 + 2.0**-24  # of the exact value
TANH = SIZE * 2.0**-11.9  # how much the GPU's tanh, off by up to 2^-10.987, adds
LENGTHS = (0, 1, 7, 8, 9, 255, 2048, 2049, 5003)

# The instructions in C, one rounding each, and what a grid of threads is to a loop.
HOST = r"""
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define __device__ static
#define __global__
typedef struct { u32 x, y, z, w; } uint4;
struct { long long x; } blockIdx, blockDim, threadIdx;
static float wide(u16 a) { _Float16 h; memcpy(&h, &a, 2); return (float)h; }
static u16 bits(double a) { _Float16 h = (_Float16)a; u16 b; memcpy(&b, &h, 2); return b; }
static u16 narrow(float a) { return bits(a); }
#define LOW(a) wide((u16)(a))
#define HIGH(a) wide((u16)((a) >> 16))
static u32 both(double low, double high) { return (u32)bits(high) << 16 | bits(low); }
static u32 mul2(u32 a, u32 b) { return both((double)LOW(a) * LOW(b), (double)HIGH(a) * HIGH(b)); }
static u32 fma2(u32 a, u32 b, u32 c)
{
    return both((double)LOW(a) * LOW(b) + LOW(c), (double)HIGH(a) * HIGH(b) + HIGH(c));
}
static u32 tanh2(u32 a) { return both(tanh((double)LOW(a)), tanh((double)HIGH(a))); }
static float mul1(float a, float b) { return a * b; }
static float fma1(float a, float b, float c) { return fmaf(a, b, c); }
static float tanh1(float a) { return tanhf(a); }
"""
MAIN = r"""
int main(int argc, char** argv)
{
    long long count = atoll(argv[2]), together = argv[1][0] == 'h' ? 1 : 0;
    int repeats = atoi(argv[3]);
    u16* x = (u16*)aligned_alloc(16, 16 * (count / 8 + 2));
    u16* y = (u16*)aligned_alloc(16, 16 * (count / 8 + 2));
    memset(y, 0xff, 16 * (count / 8 + 2));
    if ((long long)fread(x, 2, count, stdin) != count) return 1;
    blockDim.x = 256;
    for (blockIdx.x = 0; blockIdx.x < (count + 2047) / 2048; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++)
            together ? kernel_half2(x, y, count, repeats) : kernel_fp32(x, y, count, repeats);
    for (long long i = count; i < 8 * (count / 8 + 2); i++)
        if (y[i] != 0xffff) return 2;  // wrote past the end
    fwrite(y, 2, count, stdout);
    return 0;
}
"""


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16)


def test_the_emulation_is_near_gelu_for_every_number():
    result = gelu_half2.emulate(FINITE)
    assert result.dtype == np.float16 and np.isfinite(result).all()
    apart = np.abs(result.astype(np.float64) - EXACT)
    assert (apart <= EMULATED).all()
    assert (apart > EMULATED / 2).any(), "the bound is no tighter than it could be"


def test_the_kernels_source_run_as_c_is_the_emulation(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    (tmp_path / "kernels.c").write_text(gelu_half2.source(HOST).replace('extern "C"', "") + MAIN)
    command = [compiler, "-O1", "-ffp-contract=off", "-o", "kernels", "kernels.c", "-lm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode and "_Float16" in done.stderr:
        pytest.skip("this C compiler has no 16-bit numbers")
    assert not done.returncode, done.stderr

    def run(kind, values, repeats=1):
        command = [tmp_path / "kernels", kind, str(len(values)), str(repeats)]
        done = subprocess.run(command, input=values.tobytes(), capture_output=True)
        assert not done.returncode, f"exit status {done.returncode}"
        return np.frombuffer(done.stdout, dtype=np.float16)

    for length in LENGTHS:
        places = np.random.default_rng(length).permutation(len(FINITE))[:length]
        values = FINITE[places]
        once, twice = (gelu_half2.emulate(values), gelu_half2.emulate(gelu_half2.emulate(values)))
        assert np.array_equal(bits(run("half2", values)), bits(once))
        assert np.array_equal(bits(run("half2", values, repeats=2)), bits(twice))
        apart = np.abs(run("fp32", values) - EXACT[places])
        assert (apart <= SIZE[places] * 2.0**-10.9 + 2.0**-24).all()


def test_nvrtc_makes_of_it_what_the_names_say():
    try:
        nvrtc.library()
    except OSError as error:
        pytest.skip(str(error))
    for capability in ("75", "80", "90"):
        text = gelu_half2.build(capability, "ptx").decode().rstrip("\0")
        parts = {part.split("(")[0].strip(): part for part in text.split(".visible .entry")[1:]}
        pair, single = parts["kernel_half2"], parts["kernel_fp32"]
        for instruction in ("fma.rn.", "mul.rn.", "tanh.approx."):
            assert instruction + "f16x2" in pair and instruction + "f16x2" not in single
            assert instruction + "f32" in single and instruction + "f32" not in pair
        for part in (pair, single):
            assert "ld.global.v4" in part and "st.global.v4" in part, "eight values a load"
        assert gelu_half2.build(capability)[:4] == b"\x7fELF", "machine code"
    with pytest.raises(RuntimeError, match="NVRTC does not compile for capability 12"):
        gelu_half2.build("12")


def test_a_long_tensor_is_done_in_several_launches(monkeypatch):
    monkeypatch.setattr(gelu_half2, "LAUNCH", 2048)
    launches = []

    def kernel(grid, block, arguments):
        x, y, count, repeats = arguments
        assert x.numel() == y.numel() == count and x.data_ptr() % 16 == 0
        assert (grid[0] - 1) * block[0] * 8 < count <= grid[0] * block[0] * 8
        y.copy_(x + repeats)
        launches.append(count)

    for length in (0, 1, 2048, 2049, 4096, 5003):
        launches.clear()
        given = torch.arange(length, dtype=torch.float16) % 100
        result = torch.zeros_like(given)
        gelu_half2._launch(kernel, given, result, 3)
        assert torch.equal(result, given + 3) and len(launches) == -(-length // 2048)


def test_what_cannot_run_is_refused(monkeypatch):
    half = torch.zeros(3).half()
    for call, error, said in (
        (lambda: gelu_half2.emulate(np.zeros(3, np.float32)), TypeError, "float16"),
        (lambda: gelu_half2.emulate(half), TypeError, "float16"),
        (lambda: gelu_half2.gelu(half, "fp64"), ValueError, "half2, fp32"),
        (lambda: gelu_half2.gelu(half, repeats=0), ValueError, "at least 1"),
        (lambda: gelu_half2.gelu(half), TypeError, "on a GPU, not torch.float16 on cpu"),
    ):
        with pytest.raises(error, match=said):
            call()
    monkeypatch.setattr(nvrtc, "_names", lambda: ["libnvrtc-that-is-not-there.so"])
    nvrtc.library.cache_clear()
    with pytest.raises(OSError, match="NVRTC is not installed: it comes with PyTorch's builds"):
        nvrtc.library()


@pytest.mark.skipif(not gelu_half2.available()[0], reason="no GPU that can run the kernels")
@pytest.mark.parametrize("kind", gelu_half2.KINDS)
def test_on_a_gpu_it_is_gelu(kind):
    given = torch.from_numpy(FINITE.copy()).cuda()
    result = gelu_half2.gelu(given, kind).cpu().numpy().astype(np.float64)
    assert (np.abs(result - EXACT) <= EMULATED + TANH).all()
    for length in LENGTHS:
        part = given[1 : 1 + length]  # an address that 16 does not divide
        alone = torch.from_numpy(result[1 : 1 + length]).half()
        assert torch.equal(gelu_half2.gelu(part, kind).cpu(), alone)
    square = given[:4096].view(64, 64).t()
    assert torch.equal(gelu_half2.gelu(square, kind), gelu_half2.gelu(square.contiguous(), kind))
    assert gelu_half2.gelu(square, kind).shape == square.shape
    once = gelu_half2.gelu(given, kind, repeats=2)
    if kind == "half2":
        assert torch.equal(once, gelu_half2.gelu(gelu_half2.gelu(given, kind), kind))
