"""Tensor parallelism for the course's ViT and DeBERTa with torch's DTensor: each rank computes some heads and some of the
intermediate width of every layer.

Megatron's plan (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): query, key, value and the MLP's first matrix by
columns, the two matrices behind them by rows; one all-reduce after each pair in the forward pass, one before it in the
backward pass. With `sequence` (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198) each all-reduce becomes a
reduce-scatter and an all-gather, and what lies between the pairs is done on a slice of the tokens.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
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

TOKENS = Shard(1)  # of [rows, tokens, hidden]

# On CPU tensors each rank draws from its own generator, which is what `Apart` counts on.
warnings.filterwarnings(
    "ignore", message="DTensor random operators may not have complete support on cpu"
)


def split(
    model: nn.Module, mesh: DeviceMesh, sequence: bool = False, vocabulary: bool = False
) -> nn.Module:
    """Split a model of `helpers.models` over a mesh of one dimension, in place; returns it.

    Every rank passes the same weights (the same seed or checkpoint): each keeps its own slices and nothing is sent.
    Afterwards the split weights are DTensors, heads and intermediate width are divided by the ranks, and everything else
    is as before, the same on all ranks. All ranks pass the same rows; logits and gradients are those of the whole model.

    sequence    LayerNorm, dropout and residuals between the split pairs on tokens/N tokens a rank (the last ranks may have
                fewer)
    vocabulary  also cut DeBERTa's word embeddings by rows of the vocabulary: one more all-reduce of
                [rows, tokens, hidden] in the forward pass, none in the backward pass

    Dropout. Outside the split pairs all ranks must draw the same: seed them alike. Inside (DeBERTa's attention
    probabilities; with `sequence` also the dropout on slices) each must draw its own: those layers are reseeded for a
    moment from the common state and the rank. So a split model's masks are not the whole model's.
    Raises ValueError: another model, adapters, heads or width that the ranks do not divide, a mesh of two dimensions.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"A mesh of {mesh.ndim} dimensions was given: pass its tensor-parallel dimension alone, "
            "such as mesh['tensor']."
        )
    _check(model, mesh.size())
    if model.config.model_type == "vit":
        plan = _vit(model, sequence)
    else:
        plan = _deberta(model, sequence)
        if vocabulary:
            plan["deberta.embeddings.word_embeddings"] = RowwiseParallel(input_layouts=Replicate())
        for layer in model.deberta.encoder.layer:
            layer.attention.self.num_attention_heads //= mesh.size()
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_like_its_parameter)
    return model


def _like_its_parameter(parameter: DTensor) -> None:
    """With `sequence`, the gradient of what is whole on every rank is still a term of a sum: sum it. That of a cut
    vocabulary is made whole: keep the slice."""
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements).clone()


def _vit(model: nn.Module, sequence: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    for index, _ in enumerate(model.vit.layers):
        layer = f"vit.layers.{index}"
        plan |= _pair(
            layer + ".attention",
            ["q_proj", "k_proj", "v_proj"],
            layer + ".attention.o_proj",
            sequence,
            2,
        )
        plan |= _pair(layer + ".mlp", ["fc1"], layer + ".mlp.fc2", sequence, 1)
        if sequence:
            plan |= {
                f"{layer}.{name}": SequenceParallel()
                for name in ("layernorm_before", "layernorm_after")
            }
            plan[layer + ".dropout"] = Apart()
    if sequence:
        plan["vit.embeddings"] = _scatter()
        plan["vit.layernorm"] = _gather()
    return plan


def _deberta(model: nn.Module, sequence: bool) -> dict[str, ParallelStyle]:
    # All layers project the same relative embeddings. As a DTensor from the start, their gradient is summed over the
    # layers first, and then once over the ranks.
    plan: dict[str, ParallelStyle] = {
        "deberta.encoder.LayerNorm": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        )
    }
    for index, _ in enumerate(model.deberta.encoder.layer):
        layer = f"deberta.encoder.layer.{index}"
        plan |= _pair(
            layer + ".attention.self",
            ["query_proj", "key_proj", "value_proj"],
            layer + ".attention.output.dense",
            sequence,
            3,
        )
        plan |= _pair(layer + ".intermediate", ["dense"], layer + ".output.dense", sequence, 1)
        plan |= {
            layer + ".attention.self.dropout": Apart(),
            layer + ".attention.self.pos_dropout": Alike(),
        }
        if sequence:
            for part in (".attention.output", ".output"):
                plan |= {
                    layer + part + ".LayerNorm": SequenceParallel(),
                    layer + part + ".dropout": Apart(),
                }
    if sequence:
        plan["deberta.embeddings"] = _scatter()
        plan["pooler"] = _gather()
    return plan


def _pair(
    entry: str, columns: list[str], rows: str, sequence: bool, inputs: int
) -> dict[str, ParallelStyle]:
    """The module `entry` takes `inputs` arguments of which the first is made a DTensor there, once for all its columns:
    else each of query, key and value would send its own all-reduce in the backward pass."""
    come = (TOKENS if sequence else Replicate(), *[None] * (inputs - 1))
    enter = PrepareModuleInput(
        input_layouts=come, desired_input_layouts=(Replicate(), *[None] * (inputs - 1))
    )
    leave = (
        RowwiseParallel(output_layouts=TOKENS, use_local_output=False)
        if sequence
        else RowwiseParallel()
    )
    return {entry: enter, rows: leave} | {f"{entry}.{name}": ColwiseParallel() for name in columns}


def _scatter() -> ParallelStyle:
    return PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=TOKENS, use_local_output=False
    )


def _gather() -> ParallelStyle:
    return PrepareModuleInput(
        input_layouts=(TOKENS,), desired_input_layouts=(Replicate(),), use_local_output=True
    )


class Apart(ParallelStyle):
    """For a dropout layer: each rank draws its own mask, from the state common to all ranks and its own number; all
    leave it with a common state again."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if (
            device_mesh.size() == 1 or dist.get_backend(device_mesh.get_group()) == "fake"
        ):  # nobody to differ from
            return module
        rank, common = device_mesh.get_local_rank(), []

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


class Alike(ParallelStyle):
    """For dropout of a DTensor that is whole on every rank, where all draw one mask. DTensor's own would sum the gradient
    over the ranks before it applies the mask, in every layer; a mask can wait for the sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = lambda x: _Masked.apply(x, module.p) if module.training and module.p else x
        return module


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: DTensor, p: float) -> DTensor:
        out, mask = torch.native_dropout(x.to_local(), p, True)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p) if p < 1 else 0.0
        return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)

    @staticmethod
    def backward(ctx, gradient: DTensor):
        (mask,) = ctx.saved_tensors
        local = torch.ops.aten.native_dropout_backward(gradient.to_local(), mask, ctx.scale)
        return DTensor.from_local(
            local, gradient.device_mesh, gradient.placements, run_check=False
        ), None


def _generator(tensor: torch.Tensor) -> torch.Generator:
    device = tensor.device
    return (
        torch.cuda.default_generators[device.index or 0]
        if device.type == "cuda"
        else torch.default_generator
    )


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def regroup(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give split parameters groups of their own, in place, before the first step; returns the optimizer.

    torch's fused optimizers refuse a list in which some tensors are DTensors. Raises ValueError for other optimizers
    than AdamW and SGD: Adafactor and bitsandbytes' do not work on slices.
    """
    if not isinstance(optimizer, (torch.optim.AdamW, torch.optim.SGD)):
        raise ValueError(
            f"{type(optimizer).__name__} cannot step a split model: use optimizer='adamw' or 'sgd'."
        )
    for group in list(optimizer.param_groups):
        cut = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
        whole = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
        if cut and whole:
            group["params"] = whole
            group = {**group, "params": cut}
            if isinstance(
                optimizer, torch.optim.SGD
            ):  # whose fused form knows no DTensor (torch 2.13)
                group |= {"fused": False, "foreach": False}
            optimizer.add_param_group(group)
    return optimizer


@torch.no_grad()
def clip_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    own: Iterable[nn.Parameter] | None = None,
    others: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for gradients of which each rank may hold a part: the norm is that of the whole
    model. Scales them in place, returns the norm (fp32 scalar). Parts are summed over the ranks that share them out.

    own, others  in a pipeline: the parameters that count here (the copies of another stage's do not), and the stages
    """
    parameters = list(parameters)
    parts: dict[tuple, list[torch.Tensor]] = {}
    counted = parameters if own is None else own
    for gradient in [parameter.grad for parameter in counted if parameter.grad is not None]:
        shared = ()
        if isinstance(gradient, DTensor):
            shared = tuple(
                gradient.device_mesh.get_group(dim)
                for dim, placement in enumerate(gradient.placements)
                if not placement.is_replicate()
            )
        parts.setdefault(shared, []).append(local(gradient))
    total = torch.zeros((), device=parameters[0].device)
    for groups, some in parts.items():
        square = torch.stack(torch._foreach_norm(some)).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    if others is not None:
        dist.all_reduce(total, group=others)
    norm = total.sqrt()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(
        [local(gradient) for gradient in gradients], (max_norm / (norm + 1e-6)).clamp(max=1.0)
    )
    return norm


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradient of every parameter that has one, by name, on every rank: for comparing and for tests."""
    return {
        name: parameter.grad.full_tensor()
        if isinstance(parameter.grad, DTensor)
        else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


class Collectives(CommDebugMode):
    """Counts a pass's collectives, also on split models: `with Collectives() as seen: ...; seen.counts("forward")`.

    torch's CommDebugMode also follows modules, and fails on one that is called twice in a pass (torch 2.13), as ViT's
    dropout and DeBERTa's projections are. Here it follows none.
    """

    def __enter__(self):
        super().__enter__()
        tracker = self.advanced_module_tracker
        for handle in (tracker._fw_pre_handle, tracker._fw_post_handle, tracker._bw_handle):
            handle.remove()
        return self

    def counts(self, phase: str) -> dict[str, int]:
        """{"all_reduce": 8, ...} of "forward" or "backward"."""
        found = self.comm_module_counts["Global"][phase]
        return {
            str(operation).rpartition(".")[2].removesuffix("_"): number
            for operation, number in found.items()
        }


def _check(model: nn.Module, ranks: int) -> None:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in ("vit", "deberta-v2") or not hasattr(model, "classifier"):
        raise ValueError(
            f"Only the course's ViT and DeBERTa classifiers can be split, not {kind}: make the model with "
            "helpers.models.build."
        )
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("Adapters cannot be split: use a recipe with lora_rank=None.")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("The model is split already: build it again.")
    for what, number in (
        ("attention heads", config.num_attention_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if number % ranks:
            raise ValueError(
                f"{number} {what} cannot be divided by {ranks} ranks: choose a number of ranks that divides "
                f"{config.num_attention_heads} heads and an intermediate_size of {config.intermediate_size}."
            )
    if kind == "vit" and config.attention_probs_dropout_prob:
        raise ValueError(
            "ViT draws its attention dropout inside a function, where ranks cannot be told apart: "
            "set attention_probs_dropout_prob=0 in its configuration."
        )
    if kind == "deberta-v2" and not (config.share_att_key and "layer_norm" in config.norm_rel_ebd):
        raise ValueError(
            "Only DeBERTa-v3's relative attention can be split: share_att_key=True and norm_rel_ebd='layer_norm'."
        )
