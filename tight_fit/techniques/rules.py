"""The fields that decide what is stored in how many bits, what is kept, where, and for how long."""

from __future__ import annotations

from typing import Any

from tight_fit.checks import one_of, real, shown, true_or_false
from tight_fit.optimizer_kinds import KINDS, ON_HOST
from tight_fit.techniques.settings import StepSettings

ATTENTIONS = ("eager", "sdpa")
ONLY_EAGER = ("deberta", "deberta-large")  # their relative positions enter the attention's scores
GROUPED_SINCE = (2, 14)  # PyTorch whose memory-efficient attention repeats grouped keys itself
BASES = ("fp32", "bf16", "nf4")
LORA_TARGETS = ("query-value", "all-linear")
LORA_SCALES = ("alpha/r", "alpha/sqrt(r)")
LOSSES = ("full", "chunked")
OFFLOADS = ("optimizer", "activations")
SCALINGS = ("tensorwise", "rowwise")  # of float8


def check_techniques(settings: StepSettings) -> None:
    """Raises ValueError or TypeError, in one sentence, for fields that do not go together."""
    _check_adapters(settings)
    _check_memory(settings)
    _check_early_update(settings)
    _check_float8(settings)


def check_techniques_of(recipe: Any) -> None:
    """The same of a `Recipe`, and of what its model allows."""
    check_techniques(recipe)
    if recipe.attention == "sdpa" and recipe.model in ONLY_EAGER:
        raise ValueError(
            f"model={recipe.model!r} has attention='eager' alone, as its relative positions enter "
            "the attention's scores: leave attention out."
        )
    one_of("base", recipe.base, BASES)
    one_of("lora_targets", recipe.lora_targets, LORA_TARGETS)
    if recipe.loss == "chunked" and recipe.task in ("text", "image"):
        raise ValueError(
            f"loss='chunked' is for language models, and model={recipe.model!r} classifies: use "
            "loss='full'."
        )


def _check_adapters(settings: StepSettings) -> None:
    if settings.base is not None:
        one_of("base", settings.base, BASES)
    one_of("lora_scale", settings.lora_scale, LORA_SCALES)
    if settings.lora_alpha is not None:
        real("lora_alpha", settings.lora_alpha, above=0)
    if settings.base == "bf16" and settings.precision == "fp16":
        raise ValueError(
            "base='bf16' and precision='fp16' are two 16-bit formats that PyTorch does not mix: "
            "use precision='bf16', or 'fp32', which computes in the dtype of the weights."
        )
    if settings.lora_rank is not None:
        return
    if settings.base == "nf4":
        raise ValueError(
            "base='nf4' holds weights in 4 bits, which no gradient step can change: train adapters "
            "beside them with lora_rank, or use base='bf16'."
        )
    for name, usual in (
        ("lora_targets", "query-value"),
        ("lora_alpha", None),
        ("lora_scale", "alpha/r"),
    ):
        given = getattr(settings, name)
        if type(given) is not type(usual) or given != usual:  # an array has no single answer
            raise ValueError(
                f"{name}={shown(given)} is about adapters, and there are none: "
                "give lora_rank, or leave it out."
            )


def _check_memory(settings: StepSettings) -> None:
    """The fields that decide what is kept, where, and for how long."""
    if settings.attention is not None:
        one_of("attention", settings.attention, ATTENTIONS)
    one_of("loss", settings.loss, LOSSES)
    true_or_false("compile", settings.compile)
    true_or_false("optimizer_in_backward", settings.optimizer_in_backward)
    if settings.offload is not None:
        one_of("offload", settings.offload, OFFLOADS)
    stored = settings.base, getattr(settings, "weights", None)
    needed = KINDS[settings.optimizer].base
    if needed and (needed not in stored or settings.lora_rank is not None):
        raise ValueError(
            f"optimizer={settings.optimizer!r} rounds bf16 weights, and those that train here are "
            "fp32: use base='bf16' without adapters, or optimizer='adamw'."
        )
    if settings.offload == "optimizer" and settings.optimizer not in ON_HOST:
        raise ValueError(
            f"offload='optimizer' lets the CPU update, and optimizer={settings.optimizer!r} is "
            f"made for a GPU: use one of {', '.join(ON_HOST)}, or 'paged_adamw8bit' without "
            "offload."
        )
    if settings.compile and settings.offload == "activations":
        raise ValueError(
            "offload='activations' moves what each operation saves, and a compiled step has other "
            "operations: use one of the two."
        )


def _check_early_update(settings: StepSettings) -> None:
    if not settings.optimizer_in_backward:
        return
    if settings.accumulation > 1:
        raise ValueError(
            "optimizer_in_backward frees each gradient at once, so that micro-batches cannot be "
            f"added up: use accumulation=1, not {settings.accumulation}."
        )
    if settings.precision == "fp16":
        raise ValueError(
            "optimizer_in_backward updates before it is known whether a gradient overflowed: use "
            "precision='bf16' or 'fp32'."
        )
    if settings.max_grad_norm is not None:
        raise ValueError(
            "optimizer_in_backward never has all gradients together, and cannot clip them by their "
            "norm: use max_grad_norm=None."
        )


def _check_float8(settings: StepSettings) -> None:
    if settings.float8 is None:
        return
    one_of("float8", settings.float8, SCALINGS)
    for name in ("lora_rank", "frozen"):
        if getattr(settings, name) is not None:
            raise ValueError(
                f"{name}={getattr(settings, name)} keeps weights from training, and float8 "
                f"multiplies their gradients all the same: leave {name} or float8 out."
            )
    if settings.precision == "fp16":
        raise ValueError(
            "float8 scales numbers itself, and precision='fp16' scales the loss as well: use "
            "precision='bf16'."
        )
