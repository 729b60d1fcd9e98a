"""Dropout under tensor parallelism with DTensor: a mask per rank, or one that all ranks share."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

# On CPU tensors each rank draws from its own generator, and `OwnMask` relies on that.
warnings.filterwarnings(
    "ignore", message="DTensor random operators may not have complete support on cpu"
)


class OwnMask(ParallelStyle):
    """For a dropout layer in which each rank draws its own mask.

    Before the layer a rank is seeded with the state common to all ranks and its own number; after
    it all ranks are seeded alike again.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        alone = device_mesh.size() == 1
        if alone or dist.get_backend(device_mesh.get_group()) == "fake":  # no other rank draws
            return module
        rank = device_mesh.get_local_rank()
        common: list[int] = []

        def before(layer, inputs):
            if layer.training and layer.p:
                common.append(_digest(_generator(inputs[0]).get_state().numpy().tobytes()))
                _generator(inputs[0]).manual_seed(_digest(b"%d of %d" % (rank, common[0])))

        def after(layer, inputs, output):
            if common:
                _generator(inputs[0]).manual_seed(common.pop())

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)
        return module


class CommonMask(ParallelStyle):
    """For dropout of a DTensor that is whole on every rank, where all ranks draw one mask.

    DTensor's own dropout sums the gradient over the ranks before it applies the mask, in every
    layer; the mask can be applied first, and the sum can wait until the gradient is complete.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        layer.forward = lambda x: _Masked.apply(x, layer.p) if layer.training and layer.p else x
        return module


class _Masked(torch.autograd.Function):
    """Dropout with probability p of a DTensor, on each rank's own part of it."""

    @staticmethod
    def forward(ctx, x: DTensor, p: float) -> DTensor:
        out, mask = torch.native_dropout(x.to_local(), p, True)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p) if p < 1 else 0.0
        return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)

    @staticmethod
    def backward(ctx, gradient: DTensor):
        (mask,) = ctx.saved_tensors
        part = torch.ops.aten.native_dropout_backward(gradient.to_local(), mask, ctx.scale)
        mesh, placements = gradient.device_mesh, gradient.placements
        return DTensor.from_local(part, mesh, placements, run_check=False), None


def _generator(tensor: torch.Tensor) -> torch.Generator:
    """The generator that dropout of this tensor draws from."""
    if tensor.device.type == "cuda":
        return torch.cuda.default_generators[tensor.device.index or 0]
    return torch.default_generator


def _digest(text: bytes) -> int:
    """A seed, 0 to 2^56 - 1."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
