"""Which layers get LoRA adapters: by the name of a group, or by their own names."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tight_fit.checks import clipped

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

QUERY_VALUE, ALL_LINEAR = "query-value", "all-linear"
# The query and value projections by the names that libraries give them, fused ones last.
QUERY_VALUE_NAMES = (
    ("query_proj", "value_proj"),
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("q", "v"),
    ("q_lin", "v_lin"),
    ("Wqkv",),
    ("query_key_value",),
    ("qkv_proj",),
    ("qkv",),
    ("c_attn",),
)


def targets_of(model: PreTrainedModel, targets: str) -> list[str]:
    """Last parts of the names of the layers that get adapters.

    targets  "query-value"; "all-linear", every linear layer of the repeated layers of the model,
             which leaves out its head (as peft's); or names with commas, such as "q_proj,o_proj"
    Raises ValueError, in one sentence, where a group or a name matches no layer.
    """
    there = linear_layers(model)
    if targets == QUERY_VALUE:
        for known in QUERY_VALUE_NAMES:
            if there.issuperset(known):
                return list(known)
        raise ValueError(
            "LoRA stands beside the query and value projections, and "
            f"{type(model).__name__} has none whose name is known: leave lora_rank out, or name "
            "layers as lora_targets."
        )
    if targets == ALL_LINEAR:
        return sorted(there)
    names = _names(targets)
    missing = [name for name in names if not _matches(model, name)]
    if missing:
        raise ValueError(
            f"lora_targets={clipped(targets)!r}: {type(model).__name__} has no linear layer called "
            f"{' or '.join(missing)}; it has {_few(there)}."
        )
    return names


def linear_layers(model: PreTrainedModel) -> set[str]:
    """Last parts of the names of the linear layers, the output layer and classifiers left out."""
    head = model.get_output_embeddings()
    base = getattr(model, model.base_model_prefix, model)
    return {
        _last_part(name)
        for name, module in base.named_modules()
        if _is_linear(module) and module is not head and "." in name
    }


def _is_linear(module: nn.Module) -> bool:
    from torch import nn  # takes seconds, and a step is checked without it
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def _last_part(name: str) -> str:
    """A layer's own name; of one that has a number alone, with the list that it is in."""
    before, _, last = name.rpartition(".")
    return f"{before.rpartition('.')[2]}.{last}" if last.isdecimal() else last


def check_targets(targets: object) -> None:
    """Raises TypeError or ValueError for what names no layers, without a model."""
    if not isinstance(targets, str):
        raise TypeError(
            f"lora_targets={targets!r} must be a text: {QUERY_VALUE}, {ALL_LINEAR}, or names of "
            "layers with commas."
        )
    if not all(_names(targets)):
        raise ValueError(
            f"lora_targets={clipped(targets)!r} names no layer: use {QUERY_VALUE}, {ALL_LINEAR}, "
            "or names of layers with commas, such as q_proj,v_proj."
        )


def _names(targets: str) -> list[str]:
    return [name.strip() for name in targets.split(",")]


def _matches(model: nn.Module, name: str) -> bool:
    """Whether a linear layer's name is this one, or ends in it after a dot, as peft reads it."""
    return any(
        _is_linear(module) and f".{full}".endswith(f".{name}")
        for full, module in model.named_modules()
    )


def _few(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "")
