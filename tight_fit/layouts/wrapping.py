"""How torch's engines are put around a Hugging Face model: FSDP2's groups, and what is recomputed.

The same functions wrap real models and those without values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tight_fit.layouts.experts import experts_of, shard_experts, sum_gradients
from tight_fit.layouts.layout import Layout
from tight_fit.techniques import eight_bits, four_bits, model_changes
from tight_fit.techniques.model_changes import Recompute
from tight_fit.techniques.step import AUTOCAST
from tight_fit.trace.repeated_layers import layers

aten = torch.ops.aten
# What selective recomputation keeps (torchtitan's `_save_list`): the results of attention and of
# every second matrix product, and what was summed over ranks. Each kernel has a name of its own.
KEPT = {
    getattr(aten, name).default
    for name in (
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(aten, name)
} | {torch.ops._c10d_functional.reduce_scatter_tensor.default}
PRODUCTS = (aten.mm.default, eight_bits.WHOLE)


def apply_fsdp2(
    model: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    compute: str,
    reduce: str,
    experts_mesh: DeviceMesh | None = None,
) -> None:
    """Apply FSDP2 in place, with the groups that `layout.wrap` names.

    mesh     of one dimension, or of replicas and shards (HSDP)
    experts_mesh  the ranks that hold the same experts, with expert ranks: the experts of a layer
             are then a group of their own
    compute  dtype in which weights are gathered and the model computes: "fp32" or "bf16"
    reduce   dtype in which gradients are summed over the ranks
    The shards keep the dtype of the weights; those in 4 bits are packed in numbers of 16, and their
    scales are buffers, which every rank holds whole. Raises ValueError where embeddings and head
    are one tensor and should be groups of their own.
    """
    four_bits.pack_in_compute_dtype(model)
    policy = MixedPrecisionPolicy(
        param_dtype=AUTOCAST.get(compute), reduce_dtype=AUTOCAST.get(reduce, torch.float32)
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    wrapped = layers(model)
    for layer in wrapped:
        reshards = layout.reshards and layer is not wrapped[-1]
        for experts in experts_of(layer) if experts_mesh is not None else ():
            shard_experts(
                experts,
                mesh=experts_mesh,
                mp_policy=replace(policy, cast_forward_inputs=False),
                reshard_after_forward=reshards,
            )
        fully_shard(layer, reshard_after_forward=reshards, **options)
    if layout.wrap == "layers+embeddings":
        for module in _embeddings_and_head(model):
            fully_shard(module, reshard_after_forward=layout.reshards, **options)
    fully_shard(model, reshard_after_forward=layout.reshards and layout.reshard_root, **options)
    if experts_mesh is not None:
        sum_gradients(model)


def set_resharding(model: nn.Module, layout: Layout) -> None:
    """Let the groups that `apply_fsdp2` made keep or drop gathered weights as in a layout, which
    differs from theirs in nothing else."""
    wrapped = layers(model)
    parts = _embeddings_and_head(model) if layout.wrap == "layers+embeddings" else []
    groups: list[Any] = [*wrapped, *parts]
    for group in groups:
        reshards = layout.reshards and group is not wrapped[-1]
        group.set_reshard_after_forward(reshards, recurse=False)
    root: Any = model
    root.set_reshard_after_forward(layout.reshards and layout.reshard_root, recurse=False)


def prefetch(wrapped: list[Any], ahead: int) -> None:
    """Let each of these FSDP2 groups gather the next `ahead` ones in the forward pass as well."""
    for index, layer in enumerate(wrapped):
        layer.set_modules_to_forward_prefetch(wrapped[index + 1 : index + 1 + ahead])


def _embeddings_and_head(model: Any) -> list[nn.Module]:
    parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    there = [part for part in parts if part is not None]
    weights = Counter(id(weight) for part in there for weight in part.parameters())
    if any(count > 1 for count in weights.values()):
        raise ValueError(
            "The head of this model is its embeddings, one tensor for both: use wrap='layers'."
        )
    return there


def enable_recomputation(
    model: nn.Module, selective: bool, recompute: Recompute = nullcontext
) -> None:
    """Recompute each layer's activations in the backward pass, in place.

    selective  keep the results of attention and of every second product of two matrices, and make
               only the rest again (torchtitan's "op"; PyTorch's selective activation checkpointing)
    recompute  makes the context in which a layer runs for the second time
    """
    if not selective:
        model_changes.enable_checkpointing(model, recompute)  # type: ignore[arg-type]
        return

    def contexts() -> tuple:
        forward, again = create_selective_checkpoint_contexts(_policy())
        return forward, _Both(again, recompute())

    enable: Any = model
    enable.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    enable.disable_input_require_grads()


def _policy() -> Callable[..., CheckpointPolicy]:
    """What to keep of one layer: each pass counts its own products."""
    products: Counter[bool] = Counter()

    def keep(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if function in PRODUCTS:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        else:
            keeps = function in KEPT
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return keep


def kept_when_compiled() -> Callable[[Any], bool]:
    """What selective recomputation keeps of a layer that is compiled with it, for
    `trace.compiled_layers`."""
    keep, forward = _policy(), SimpleNamespace(is_recompute=False)
    return lambda function: keep(forward, function) is CheckpointPolicy.MUST_SAVE


class _Both:
    """Two contexts, one inside the other."""

    def __init__(self, outer: Any, inner: Any):
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.inner.__exit__(*exception)
        self.outer.__exit__(*exception)
