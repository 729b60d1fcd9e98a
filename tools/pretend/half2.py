"""NVRTC and the launch of the half2 kernels, where there is neither compiler nor GPU.

What a real GPU would refuse is refused here: another architecture, a kernel that is not in the
image, arguments of another kind, a launch that leaves values out or reads beside them. Then the
CPU computes what the kernel's arithmetic gives (`gelu_half2.emulate`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import torch

ARCHITECTURE = re.compile(r"--gpu-architecture=(?:sm|compute)_(\d+)")
MOST = 1 << 17  # values that are computed; of more the first ones, twice, and the rest is copied


def compile_cuda(source: str, capability: str, form: str = "cubin") -> bytes:
    """What `by_hand.nvrtc.compile_cuda` gives: here the names of the kernels.

    Raises RuntimeError for source without kernels, and for a capability that is none.
    """
    kernels = re.findall(r'extern "C" __global__ void (\w+)\(', source)
    if not kernels or source.count("{") != source.count("}"):
        raise RuntimeError(f"NVRTC does not compile for capability {capability}: no kernels")
    if not ARCHITECTURE.fullmatch(f"--gpu-architecture=sm_{capability}"):
        raise RuntimeError(f"NVRTC does not compile for capability {capability}: unknown")
    return json.dumps({"capability": capability, "form": form, "kernels": kernels}).encode()


def load_module(image: bytes, names: list[str]) -> dict[str, Callable]:
    """`torch.cuda._utils._cuda_load_module`: the kernels of an image of `compile_cuda`.

    Raises RuntimeError, in the driver's words, for another GPU's code and for an unknown name.
    """
    content = json.loads(image)
    here = "".join(map(str, torch.cuda.get_device_capability()))
    if content["form"] == "cubin" and content["capability"] != here:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    missing = [name for name in names if name not in content["kernels"]]
    if missing:
        raise RuntimeError(f"CUDA error: named symbol not found ({missing[0]})")
    return {name: _kernel(name.removeprefix("kernel_")) for name in names}


def _kernel(kind: str) -> Callable:
    def launch(grid, block, arguments, shared_mem: int = 0, stream: object = None) -> None:
        x, y, count, repeats = arguments
        _check(grid, block, x, y, count, repeats)
        source, target = (torch.ops.pretended.on_host(tensor) for tensor in (x, y))
        target[:count] = source[:count]
        times = repeats if count <= MOST else min(repeats, 2)
        target[: min(count, MOST)] = _gelu(source[: min(count, MOST)], kind, times)

    return launch


def _gelu(x: torch.Tensor, kind: str, times: int) -> torch.Tensor:
    if kind == "fp32":
        wide = x.float()
        for _ in range(times):
            wide = torch.nn.functional.gelu(wide, approximate="tanh")
        return wide.half()
    from by_hand import gelu_half2

    values = x.numpy()
    for _ in range(times):
        values = gelu_half2.emulate(values)
    return torch.from_numpy(values)


def _check(grid, block, x, y, count, repeats) -> None:
    for tensor in (x, y):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
            raise ValueError("All tensor arguments must be CUDA tensors or pinned CPU tensors")
        if tensor.dtype != torch.float16:
            raise RuntimeError(f"A GPU would read {tensor.dtype} as float16, without an error.")
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise RuntimeError("CUDA error: misaligned address")
    for number in (count, repeats):
        if type(number) is not int or not 0 < number < 2**31:
            raise TypeError(f"Unsupported argument: {number!r} is no 32-bit int")
    threads = grid[0] * block[0]
    if max(block) > 1024 or not 8 * threads >= count or count > min(x.numel(), y.numel()):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
