"""Tensor parallelism for the course's ViT and DeBERTa with torch's DTensor.

Each rank computes some of the heads and some of the intermediate size of every layer. The plan is
Megatron's (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): query, key, value and the MLP's
first matrix are cut by columns, the two matrices behind them by rows. There is one all-reduce after
each such pair in the forward pass and one before it in the backward pass. With `sequence`
(Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198) each all-reduce becomes a reduce-scatter
and an all-gather, and what lies between the pairs is computed on a slice of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from helpers.parallel.dtensor_dropout import CommonMask, OwnMask

TOKENS = Shard(1)  # the layout of [examples, tokens, hidden] with slices of the tokens


def split(
    model: nn.Module, mesh: DeviceMesh, sequence: bool = False, vocabulary: bool = False
) -> nn.Module:
    """Split a model of `helpers.models` over a mesh of one dimension, in place; returns the model.

    Every rank passes the same weights (the same seed or checkpoint): each keeps its own slices and
    nothing is sent. Afterwards the split weights are DTensors, heads and intermediate size are
    divided by the ranks, and everything else is the same on all ranks as before. All ranks pass the
    same examples; logits and gradients are those of the whole model.

    sequence    LayerNorm, dropout and residual connections between the split pairs work on tokens/N
                tokens per rank (the last ranks may have fewer)
    vocabulary  also cut DeBERTa's word embeddings by rows of the vocabulary: one more all-reduce of
                [examples, tokens, hidden] in the forward pass, none in the backward pass

    Dropout: outside the split pairs all ranks must draw the same masks, so seed them alike. Inside
    (DeBERTa's attention probabilities; with `sequence` also the dropout on slices) each rank must
    draw its own: those layers are reseeded for a moment, from the common state and the rank. So the
    masks of a split model are not those of the whole model.
    Raises ValueError for another model, adapters, heads or an intermediate size that the ranks do
    not divide, and a mesh of several dimensions.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"A mesh of {mesh.ndim} dimensions was given: pass its tensor-parallel dimension "
            "alone, such as mesh['tensor']."
        )
    _check(model, mesh.size())
    parts: Any = model
    if parts.config.model_type == "vit":
        plan = _vit(len(parts.vit.layers), sequence)
    else:
        plan = _deberta(len(parts.deberta.encoder.layer), sequence)
        if vocabulary:
            plan["deberta.embeddings.word_embeddings"] = RowwiseParallel(input_layouts=Replicate())
        for layer in parts.deberta.encoder.layer:
            layer.attention.self.num_attention_heads //= mesh.size()
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_place_gradient)
    return model


def _place_gradient(parameter: Any) -> None:
    """Give a gradient the placements of its parameter.

    With `sequence`, the gradient of a parameter that is whole on every rank is still one term of a
    sum: it is summed. That of a cut vocabulary is made whole by torch: the slice is kept.
    """
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements).clone()


def _vit(layers: int, sequence: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for index in range(layers):
        layer = f"vit.layers.{index}"
        attention, mlp = f"{layer}.attention", f"{layer}.mlp"
        plan |= _pair(attention, ["q_proj", "k_proj", "v_proj"], f"{attention}.o_proj", sequence, 2)
        plan |= _pair(mlp, ["fc1"], f"{mlp}.fc2", sequence, 1)
        if sequence:
            plan[f"{layer}.layernorm_before"] = SequenceParallel()
            plan[f"{layer}.layernorm_after"] = SequenceParallel()
            plan[f"{layer}.dropout"] = OwnMask()
    if sequence:
        plan["vit.embeddings"] = _scatter()
        plan["vit.layernorm"] = _gather()
    return plan


def _deberta(layers: int, sequence: bool) -> dict[str, ParallelStyle]:
    # All layers project the same relative embeddings. As they are a DTensor from the start, their
    # gradient is summed over the layers first, and then once over the ranks.
    plan: dict[str, ParallelStyle] = {
        "deberta.encoder.LayerNorm": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        )
    }
    for index in range(layers):
        layer = f"deberta.encoder.layer.{index}"
        attention = f"{layer}.attention.self"
        columns = ["query_proj", "key_proj", "value_proj"]
        plan |= _pair(attention, columns, f"{layer}.attention.output.dense", sequence, 3)
        plan |= _pair(f"{layer}.intermediate", ["dense"], f"{layer}.output.dense", sequence, 1)
        plan[f"{attention}.dropout"] = OwnMask()
        plan[f"{attention}.pos_dropout"] = CommonMask()
        if sequence:
            for output in (f"{layer}.attention.output", f"{layer}.output"):
                plan[f"{output}.LayerNorm"] = SequenceParallel()
                plan[f"{output}.dropout"] = OwnMask()
    if sequence:
        plan["deberta.embeddings"] = _scatter()
        plan["pooler"] = _gather()
    return plan


def _pair(
    entry: str, columns: list[str], rows: str, sequence: bool, inputs: int
) -> dict[str, ParallelStyle]:
    """The plan of matrices cut by columns and the matrix behind them, which is cut by rows.

    The module `entry` takes `inputs` arguments; the first is made a DTensor there, once for all of
    its columns. Otherwise query, key and value would each send an all-reduce in the backward pass.
    """
    others = [None] * (inputs - 1)
    enter = PrepareModuleInput(
        input_layouts=(TOKENS if sequence else Replicate(), *others),
        desired_input_layouts=(Replicate(), *others),
    )
    if sequence:
        leave = RowwiseParallel(output_layouts=TOKENS, use_local_output=False)
    else:
        leave = RowwiseParallel()
    return {entry: enter, rows: leave} | {f"{entry}.{name}": ColwiseParallel() for name in columns}


def _scatter() -> ParallelStyle:
    return PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=TOKENS, use_local_output=False
    )


def _gather() -> ParallelStyle:
    return PrepareModuleInput(
        input_layouts=(TOKENS,), desired_input_layouts=(Replicate(),), use_local_output=True
    )


def regroup(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give split parameters groups of their own, in place; returns the optimizer.

    torch's fused optimizers refuse a list in which only some tensors are DTensors. Call it before
    the first step. Raises ValueError for other optimizers than AdamW and SGD: Adafactor and those
    of bitsandbytes do not work on slices.
    """
    if not isinstance(optimizer, (torch.optim.AdamW, torch.optim.SGD)):
        raise ValueError(
            f"{type(optimizer).__name__} cannot step a split model: use optimizer='adamw' or 'sgd'."
        )
    for group in list(optimizer.param_groups):
        slices = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
        whole = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
        if slices and whole:
            group["params"] = whole
            added = {**group, "params": slices}
            if isinstance(optimizer, torch.optim.SGD):  # its fused form knows no DTensor (2.13)
                added |= {"fused": False, "foreach": False}
            optimizer.add_param_group(added)
    return optimizer


def gather(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: the whole gradient} of all parameters that have one, on every rank: to compare."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in gradients.items()
        if gradient is not None
    }


class Collectives(CommDebugMode):
    """Counts the collectives of a pass, also of split models.

        with Collectives() as collectives:
            loss_sum(model, batch, recipe).backward()
        collectives.counts("forward")

    torch's CommDebugMode also follows modules, and fails on one that is called twice in a pass
    (torch 2.13), as ViT's dropout and DeBERTa's projections are. Here it follows none.
    """

    def __enter__(self):
        super().__enter__()
        tracker = self.advanced_module_tracker
        for handle in (tracker._fw_pre_handle, tracker._fw_post_handle, tracker._bw_handle):
            handle.remove()
        return self

    def counts(self, phase: str) -> dict[str, int]:
        """{"all_reduce": 8, ...}: collectives of the "forward" or the "backward" pass by name."""
        return {
            str(operation).rpartition(".")[2].removesuffix("_"): number
            for operation, number in self.comm_module_counts["Global"][phase].items()
        }


def _check(model: nn.Module, ranks: int) -> None:
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in ("vit", "deberta-v2") or not hasattr(model, "classifier"):
        raise ValueError(
            f"Only the course's ViT and DeBERTa classifiers can be split, not {kind}: make the "
            "model with helpers.models.build."
        )
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("Adapters cannot be split: use a recipe with lora_rank=None.")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("The model is split already: build it again.")
    heads, intermediate = config.num_attention_heads, config.intermediate_size
    for what, number in (("attention heads", heads), ("intermediate_size", intermediate)):
        if number % ranks:
            raise ValueError(
                f"{number} {what} cannot be divided by {ranks} ranks: choose a number of ranks "
                f"that divides {heads} heads and an intermediate_size of {intermediate}."
            )
    if kind == "vit" and config.attention_probs_dropout_prob:
        raise ValueError(
            "ViT draws its attention dropout inside a function, where ranks cannot draw different "
            "masks: set attention_probs_dropout_prob=0 in its configuration."
        )
    if kind == "deberta-v2" and not (config.share_att_key and "layer_norm" in config.norm_rel_ebd):
        raise ValueError(
            "Only DeBERTa-v3's relative attention can be split: use share_att_key=True and "
            "norm_rel_ebd='layer_norm'."
        )
