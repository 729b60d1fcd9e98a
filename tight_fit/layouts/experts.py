"""Expert parallelism of any mixture of experts whose weights transformers stacks in one tensor.

As torchtitan does it (`expert_parallel.py`; Lepikhin et al. 2020, GShard): each rank keeps some of
the experts of every layer. It sorts its pairs of token and expert by expert, tells the other ranks
how many rows they get (a first all-to-all), and sends the rows there (dispatch). The experts of a
rank compute in one grouped product each, and a third all-to-all brings the rows back (combine). No
token is dropped. The backward pass sends the gradients of the rows the same ways back.

On ranks without values (`layouts.plan.plan_layout`) nobody knows where a token goes: there routing
is taken to be balanced, so that a rank gets as many rows from each rank as it sends to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "dispatched"  # of the experts' forward pass, among transformers' own


def experts_of(module: nn.Module) -> list[Any]:
    """The modules that hold the stacked weights of a layer's experts each, in order."""
    return [part for part in module.modules() if hasattr(part, "has_gate")]


def split_experts(model: Any, mesh: DeviceMesh) -> None:
    """Divide the experts of a model over the ranks of `mesh`, in place. Every rank passes the same
    weights and keeps its experts; nothing is sent.

    Raises ValueError for a model without such experts, and where the ranks do not divide them.
    """
    ranks, own = mesh.size(), mesh.get_local_rank()
    found = experts_of(model)
    check_experts(model, found, ranks)
    ALL_EXPERTS_FUNCTIONS.register(NAME, dispatched)
    for experts in found:
        for name, weight in list(experts.named_parameters(recurse=False)):
            part = weight.detach().chunk(ranks)[own].clone()
            setattr(experts, name, nn.Parameter(part, requires_grad=weight.requires_grad))
        experts.expert_group = mesh.get_group()
        experts.config._experts_implementation = NAME


def check_experts(model: Any, found: list[Any], ranks: int) -> None:
    """Raises ValueError, in one sentence, where experts cannot be divided over so many ranks."""
    kind = model.config.model_type
    if not found:
        raise ValueError(
            f"expert={ranks} divides the experts of a layer, and this {kind} model has none that "
            "transformers stacks in one tensor: leave expert out."
        )
    for experts in found:
        if experts.has_bias or getattr(experts, "has_post_expert_norm", False):
            raise ValueError(
                f"Experts with biases or norms, as in this {kind} model, are not planned with "
                "expert ranks: leave expert out."
            )
        if experts.num_experts % ranks:
            raise ValueError(
                f"{experts.num_experts} experts cannot be divided by expert={ranks} ranks: use a "
                f"divisor of {experts.num_experts}."
            )


def placement(experts: Any, shards: int) -> int:
    """The dimension along which FSDP2 divides the weights of a rank's experts over `shards` ranks:
    that of the experts, or the next one where there are fewer experts than ranks, as torchtitan has
    it. Raises ValueError where the ranks do not divide that one."""
    for weight in experts.parameters(recurse=False):
        if weight.shape[0] >= shards:
            return 0
        if weight.shape[1] % shards:
            raise ValueError(
                f"{weight.shape[0]} experts of {weight.shape[1]} rows cannot be divided by "
                f"{shards} ranks: use fewer data ranks for each expert rank."
            )
    return 1


def shard_experts(experts: Any, **options: Any) -> None:
    """Apply FSDP2 to the experts of a rank, over the ranks of `options["mesh"]`."""
    along = Shard(placement(experts, options["mesh"].size()))
    fully_shard(experts, shard_placement_fn=lambda weight: along, **options)


def sum_gradients(model: nn.Module) -> None:
    """Let every group of FSDP2 sum gradients and not average them: experts and other weights are
    divided over unlike many ranks."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def dispatched(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward pass of experts that are divided over ranks, as transformers calls it.

    hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top k]; the result has
    the shape of `hidden_states`. Raises ValueError where routing cannot be balanced on ranks
    without values.
    """
    group, (tokens, top_k) = experts.expert_group, top_k_index.shape
    pairs, order = top_k_index.flatten().sort(stable=True)
    kinds = torch.arange(experts.num_experts, device=pairs.device)
    ends = torch.searchsorted(pairs, kinds, right=True)
    leaving = ends.diff(prepend=ends.new_zeros(1))  # rows for each expert
    arriving = torch.empty_like(leaving)  # [ranks × experts of this rank]
    dist.all_to_all_single(arriving, leaving, group=group)
    sends, receives = (_rows_by_rank(counts, group, len(pairs)) for counts in (leaving, arriving))
    rows = AllToAll.apply(hidden_states[order // top_k], sends, receives, group)
    rows = _computed(experts, rows, arriving, group.size())
    rows = AllToAll.apply(rows, receives, sends, group)
    weighted = rows[_inverse(order)] * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)


class AllToAll(torch.autograd.Function):
    """An all-to-all of rows: so many go to each rank, so many come from each; the gradient travels
    the same way back."""

    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.back = receives, sends, group
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, *ctx.back), None, None, None


def _rows_by_rank(counts: torch.Tensor, group: dist.ProcessGroup, pairs: int) -> list[int]:
    """How many rows go to, or come from, each rank; the CPU waits for their number."""
    ranks = group.size()
    by_rank = counts.view(ranks, -1).sum(1)
    if dist.get_backend(group) != "fake":
        return by_rank.tolist()
    if pairs % ranks:
        raise ValueError(
            f"The {pairs} pairs of token and expert of a micro-batch cannot be divided evenly by "
            f"expert={ranks} ranks: choose another length."
        )
    by_rank[0].item()  # waits as `tolist` does
    return [pairs // ranks] * ranks


def _computed(experts: Any, rows: torch.Tensor, arriving: torch.Tensor, ranks: int) -> torch.Tensor:
    """What this rank's experts make of the rows [rows, hidden] that have come, in their order."""
    counts = arriving.view(ranks, -1)
    kinds = torch.arange(counts.shape[1], device=rows.device).repeat(ranks)
    order = kinds.repeat_interleave(arriving, output_size=len(rows)).argsort(stable=True)
    ends = counts.sum(0).cumsum(0, dtype=torch.int32)

    def product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        weights = weights if experts.is_transposed else weights.transpose(-2, -1)
        return F.grouped_mm(rows.to(weights.dtype), weights, offs=ends)

    if experts.has_gate:
        inner = experts._apply_gate(product(rows[order], experts.gate_up_proj))
    else:
        inner = experts.act_fn(product(rows[order], experts.up_proj))
    return product(inner, experts.down_proj)[_inverse(order)]


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The order that undoes an order."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
