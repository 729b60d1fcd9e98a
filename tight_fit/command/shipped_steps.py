"""Steps of a well-known model of which lines ship with the package (`command.ship_traces`).

A model's step as it is, and with the changes that most people make, alone and together. Of
optimizers only their parts are kept (`plans.other_optimizer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from tight_fit.models import config as hf_config
from tight_fit.models.config import LANGUAGE_MODELS
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import OPTIMIZERS
from tight_fit.search.remedies import RANK, Remedies

# Ranks of adapters of which an optimizer's part and a line of offloaded activations are kept: from
# some rank on the activations of the adapters are offloaded as well.
RANKS = (RANK, 16, 32, 64)
# Fields whose values are taken with each of the others'.
TOGETHER: dict[str, tuple[Any, ...]] = {
    "precision": (None, "bf16", "fp16"),
    "accumulation": (1, 2),  # that with more micro-batches is computed from it
    "checkpointing": (False, True),
    "lora_rank": (None, RANK),
}
ALONE: tuple[dict[str, Any], ...] = (
    {"precision": "fp16"},
    {"weights": "bf16", "precision": "bf16"},
    {"offload": "activations"},
    {"offload": "activations", "precision": "fp16"},
    {"offload": "activations", "precision": "bf16"},
)
# Taken in each precision.
IN_EACH: tuple[dict[str, Any], ...] = (
    {"attention": "eager"},
    {"compile": True},
    {"lora_rank": RANK, "lora_targets": "all-linear"},
    {"optimizer_in_backward": True, "max_grad_norm": None},
)
# DPO, whose examples are pairs of answers.
OF_PAIRS: tuple[dict[str, Any], ...] = tuple(
    {"task": "dpo", "lora_rank": rank, "checkpointing": again}
    for rank, again in product((None, RANK), (False, True))
)
# Each number of frozen layers has a line in a model with fewer than twice as many layers, every
# second number in one with twice as many, and so on.
FROZEN = 12
OTHERS: tuple[dict[str, Any], ...] = (
    *({"optimizer": name} for name in OPTIMIZERS if name not in ("adamw", "muon")),
    {"offload": "optimizer"},
)
TURING = (7, 5)  # the compute capability of a T4


def steps_of(step: ModelStep) -> Iterator[ModelStep]:
    """A step with the changes that it takes."""
    yield from _changed(step, _together(step))
    yield from _changed(step, _alone(step))
    yield from (changed.on(TURING) for changed in _changed(step, _without_bf16(step)))


def _changed(step: ModelStep, changes: Iterable[dict[str, Any]]) -> Iterator[ModelStep]:
    for change in changes:
        changed = change | {"precision": change.get("precision") or step.precision}
        with suppress(ValueError):
            yield replace(step, **changed)
        if "accumulation" in change:  # one example per micro-batch
            with suppress(ValueError):
                yield replace(step, **changed, batch_size=change["accumulation"])


def _together(step: ModelStep) -> Iterator[dict[str, Any]]:
    """Changes of `TOGETHER`; of a language model also in 4 bits, and with its loss in chunks."""
    in_four = Remedies(step, "H100").four_bits()
    for loss in ("full", "chunked") if step.task in LANGUAGE_MODELS else ("full",):
        for values in product(*TOGETHER.values()):
            change = dict(zip(TOGETHER, values), loss=loss)
            # Weights in 16 bits take autocast of their own dtype.
            if step.weights == "fp32" or change["precision"] is None:
                yield change
            if change["precision"] is None and change["lora_rank"]:
                yield from (change | other for other in in_four)


def _alone(step: ModelStep) -> Iterator[dict[str, Any]]:
    yield from ALONE
    for rank, base in product(RANKS, ({}, *Remedies(step, "H100").four_bits())):
        yield {**base, "offload": "activations", "lora_rank": rank}
    for precision in TOGETHER["precision"] if step.weights == "fp32" else (None,):
        yield from ({"precision": precision, **change} for change in IN_EACH)
    if step.task == "causal-lm":
        yield from OF_PAIRS
    layers = getattr(hf_config.text_config(step.config), "num_hidden_layers", 0)
    for number in range(layers, 0, -max(1, layers // FROZEN)):
        yield {"frozen": number}


def _without_bf16(step: ModelStep) -> Iterator[dict[str, Any]]:
    """Adapters of a language model on a GPU without bf16, such as a T4: beside weights in fp16."""
    half = {"weights": "fp16", "precision": "fp16", "lora_rank": RANK}
    names = "accumulation", "checkpointing", "loss", "base"
    values = product(*(TOGETHER[name] for name in names[:2]), ("full", "chunked"), (None, "nf4"))
    if step.task == "causal-lm":
        yield from (half | dict(zip(names, some)) for some in values)


def with_optimizers(step: ModelStep) -> Iterator[ModelStep]:
    """A step with each of the other optimizers, whose parts are of use in others."""
    bases = [{}, *Remedies(step, "H100").four_bits()]
    if step.task == "causal-lm":
        bases += [{"weights": "fp16"}, {"weights": "fp16", "base": "nf4"}]
    adapters = [base | {"lora_rank": rank} for rank in RANKS for base in bases]
    for precision, which in product((step.precision, "fp16"), ({}, *adapters)):
        weights = which.get("weights", step.weights)
        # Weights in 16 bits take autocast of their own dtype.
        if precision == "fp16" and weights == "bf16" or precision != "fp16" and weights == "fp16":
            continue
        for other in OTHERS:
            with suppress(ValueError):
                yield replace(step, **{"precision": precision} | which | other)
