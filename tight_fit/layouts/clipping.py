"""Clipping of gradients that are laid over several ranks, by the norm of the whole model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tight_fit.torch_private import foreach_mul_, foreach_norm


@torch.no_grad()
def clip_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    others: dist.ProcessGroup | None = None,
    experts: Iterable[nn.Parameter] = (),
    expert_ranks: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for gradients of which each rank may hold a part.

    The L2 norm is that of the whole model; parts are summed over the ranks that divide a tensor.
    Scales the gradients in place and returns the norm before, an fp32 scalar.

    others  in a pipeline, the process group of its stages
    experts  the parameters that expert ranks hold a part of each, beside what their DTensor says
    expert_ranks  the process group of these ranks
    """
    parameters, apart = list(parameters), set(experts)
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            groups = tuple(
                gradient.device_mesh.get_group(dim)
                for dim, placement in enumerate(gradient.placements)
                if not placement.is_replicate()
            )
        if expert_ranks is not None and parameter in apart:
            groups += (expert_ranks,)
        parts.setdefault(groups, []).append(local(gradient))
    total = torch.zeros((), device=parameters[0].device)
    for groups, gradients in parts.items():
        square = torch.stack(foreach_norm(gradients)).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    if others is not None:
        dist.all_reduce(total, group=others)
    norm = total.sqrt()
    scaled = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    foreach_mul_(scaled, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
