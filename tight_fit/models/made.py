"""The model of a step, with values or without: as transformers makes it, and as it is trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from tight_fit.models import config as hf_config
from tight_fit.models import odd
from tight_fit.models.config import CannotPlan
from tight_fit.models.step import ModelStep
from tight_fit.packages import needs
from tight_fit.techniques import (
    base_weights,
    eight_bits,
    four_bits,
    model_changes,
    preferences,
    references,
    targets,
)
from tight_fit.techniques.chunked_loss import HeadInChunks, put_in_chunks
from tight_fit.techniques.model_changes import Recompute, as_if_real
from tight_fit.techniques.precision import DTYPES
from tight_fit.techniques.step import AUTOCAST
from tight_fit.torch_private import disable_current_modes
from tight_fit.trace.fake_tensors import leave_meta


class Logits(NamedTuple):
    """What the course's step reads from a model's answer."""

    logits: torch.Tensor


class FlatLogits(nn.Module):
    """A model whose logits have one row per label, [labels, classes], for the course's step.

    Of a segmentation they are [examples, classes, height, width], at the size of the images; of
    pairs the similarities of each image with all texts, and of each text with all images.

    reference  a frozen model that dpo or grpo compares this one with; None: none is in memory
    """

    reference: FlatLogits | None

    def __init__(self, model: PreTrainedModel, task: str):
        super().__init__()
        self.model, self.task, self.reference = model, task, None

    def get_output_embeddings(self) -> nn.Module | None:
        """The output layer of a language model."""
        return self.model.get_output_embeddings()

    def forward(self, **inputs) -> Logits:
        answer = self.model(**inputs)
        if isinstance(self.get_output_embeddings(), HeadInChunks):
            return Logits(answer.logits)
        if self.task == "contrastive":
            return Logits(torch.cat([answer.logits_per_image, answer.logits_per_text]))
        if self.task == "semantic-segmentation":
            size = inputs["pixel_values"].shape[-2:]
            return Logits(F.interpolate(answer.logits, size, mode="bilinear", align_corners=False))
        return Logits(answer.logits.flatten(0, -2))


def empty(model_step: ModelStep, recompute: Recompute = nullcontext) -> FlatLogits:
    """The model without values, for `trace_steady`; FakeTensorMode must be active."""

    def fake() -> PreTrainedModel:
        with disable_current_modes():
            model = on_meta(model_step)
        leave_meta(model, model_step.weights == "fp32")
        return model

    with as_if_real(), no_init_weights():  # adapters' neither
        return compared(prepare(fake(), model_step, recompute), model_step, fake)


def real(model_step: ModelStep) -> FlatLogits:
    """The model with random weights, as it is trained. Raises what `make` and `prepare` raise."""
    return compared(prepare(make(model_step), model_step), model_step, lambda: make(model_step))


def compared(
    model: FlatLogits, model_step: ModelStep, other: Callable[[], PreTrainedModel]
) -> FlatLogits:
    """The model, with a frozen copy beside it where the step keeps one in memory."""
    if model_step.compared_with == references.MODEL:
        copy = other()
        _quantize(copy, model_step)
        if model_step.loss == "chunked":
            put_in_chunks(copy, always=True)
        model.reference = FlatLogits(copy.requires_grad_(False), model.task).eval()
    return model


def on_meta(model_step: ModelStep) -> PreTrainedModel:
    """The model as `make` makes it, of shapes alone, and its tied weights as one tensor each.

    Raises ValueError as `make` does.
    """
    with torch.device("meta"), no_init_weights(), model_changes.quiet():
        model = make(model_step)
        model.tie_weights()
    return model


def make(model_step: ModelStep) -> PreTrainedModel:
    """The model with random weights. Raises CannotPlan where transformers cannot make it.

    Raises ValueError for a length that the model does not take.
    """
    config = _config(model_step)
    assert model_step.task is not None, "set when the step was made"
    kind = hf_config.class_of(config, model_step.task)
    assert kind is not None, "else the task would have been refused"
    if model_step.attention == "sdpa" and not getattr(kind, "_supports_sdpa", True):
        raise CannotPlan(f"{kind.__name__} has attention='eager' alone: leave attention out.")
    try:
        with model_changes.default_dtype(DTYPES[model_step.weights or "fp32"]):
            model = kind(config)
    except Exception as error:  # a missing library, sizes that do not fit: each its own type
        raise CannotPlan(
            f"transformers cannot make this {config.model_type} model: "
            f"{hf_config.sentence(error)[:-1]}{odd.hint(config.model_type, config.to_dict())}."
        ) from error
    most = hf_config.most_positions(model, config)
    if model_step.tokens is not None and most is not None and model_step.tokens > most:
        raise ValueError(
            f"length={model_step.tokens} is longer than the {most} tokens this model takes."
        )
    _keep_in_fp32(model, model_step.weights)
    return model


def _keep_in_fp32(model: PreTrainedModel, weights: str | None) -> None:
    """Make those parameters fp32 that transformers keeps so whatever dtype is asked for."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if weights == "fp16":
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters() if weights != "fp32" else ():
        if any(re.search(rf"(^|\.){re.escape(part)}($|\.)", name) for part in kept):
            parameter.data = parameter.data.float()


def _config(model_step: ModelStep) -> PretrainedConfig:
    """The step's configuration as it is trained."""
    config = hf_config.read(model_step.config)
    # None is the library's own choice, whatever the file asks for.
    config._attn_implementation = model_step.attention
    if model_step.classes is not None:
        config.num_labels = model_step.classes
    # The library would otherwise guess it from the labels' dtype.
    config.problem_type = "single_label_classification"
    if model_step.reads == "image":
        return config
    config.use_cache = False  # as Trainer sets it: keys and values are kept for generation only
    text = hf_config.text_config(config)
    classifies = model_step.task == "sequence-classification"
    if classifies and getattr(text, "pad_token_id", None) is None:
        # Decoders classify by the last token that is not padding, so they must know its id.
        text.pad_token_id = config.pad_token_id = 0
    return config


def prepare(
    model: PreTrainedModel, model_step: ModelStep, recompute: Recompute = nullcontext
) -> FlatLogits:
    """What the fields do to a model, in place; in training mode.

    Raises CannotPlan for a field that this model does not allow.
    """
    if model_step.checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise CannotPlan(
                f"{type(model).__name__} has no gradient checkpointing: leave checkpointing out."
            )
        model_changes.enable_checkpointing(model, recompute)
    frozen = _frozen_names(model, model_step)
    if model_step.task == "dpo":
        preferences.without_dropout(model)
    _quantize(model, model_step)
    if model_step.kbit:
        model.enable_input_require_grads()
    if model_step.lora_rank is not None:
        layers = None
        if model_step.frozen is not None:
            layers = range(model_step.frozen, hf_config.text_config(model.config).num_hidden_layers)
        needs("peft")
        names = targets.targets_of(model, model_step.lora_targets)
        model_changes.add_lora(
            model, model_step.lora_rank, names, layers, model_step.lora_alpha, model_step.lora_scale
        )
        base_weights.widen_adapters(model)  # peft makes them in the dtype of their layer, then fp32
        frozen = _frozen_beside_adapters(model, model_step)
    model_changes.freeze(model, frozen)
    if model_step.loss == "chunked":
        put_in_chunks(model)
    if model_step.float8 is not None:
        eight_bits.multiply_in_8_bits(model, model_step.float8)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CannotPlan("Nothing is left to train.")
    assert model_step.task is not None, "set when the step was made"
    return FlatLogits(model, model_step.task).train()


def _quantize(model: PreTrainedModel, model_step: ModelStep) -> None:
    """Put the weights into 4 bits where the step asks for it, in place."""
    if model_step.base == "nf4":
        compute = AUTOCAST.get(model_step.precision)
        four_bits.quantize(model, compute or DTYPES[model_step.weights or "bf16"])
    if model_step.kbit:
        four_bits.rest_in_fp32(model)


def _frozen_names(model: PreTrainedModel, model_step: ModelStep) -> set[str]:
    """The embeddings and the first `frozen` layers: names of parameters."""
    if model_step.frozen is None:
        return set()
    count = getattr(hf_config.text_config(model.config), "num_hidden_layers", None)
    stack = model_changes.layer_stack(model, count)
    if count is None or stack is None:
        raise CannotPlan(
            f"frozen={model_step.frozen} counts the layers of one stack, and "
            f"{type(model).__name__} has none or several: leave frozen out."
        )
    if model_step.frozen > count:
        raise ValueError(
            f"frozen={model_step.frozen} is more than the {count} layers of this model."
        )
    return model_changes.embeddings_and_layers(model, stack, model_step.frozen)


def _frozen_beside_adapters(model: PreTrainedModel, model_step: ModelStep) -> set[str]:
    """With LoRA: all but the adapters and the head of a classifier, which is new.

    The head of a language model came with the checkpoint, and is frozen.
    """
    base = f"{model.base_model_prefix}." if model_step.kind.classifies else ""
    return {
        name
        for name, _ in model.named_parameters()
        if "lora_" not in name and name.startswith(base)
    }
