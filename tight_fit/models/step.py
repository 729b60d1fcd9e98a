"""Any Hugging Face model: the settings of its step, and the model, with or without values."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from tight_fit.checks import check_step, make_plain, one_of, true_or_false, whole
from tight_fit.models import bounds as config_bounds
from tight_fit.models import config as hf_config
from tight_fit.models import odd
from tight_fit.models.config import TASKS, CannotPlan, Task
from tight_fit.packages import needs
from tight_fit.techniques import four_bits, model_changes, targets
from tight_fit.techniques.chunked_loss import HeadInChunks, put_in_chunks
from tight_fit.techniques.model_changes import Recompute, as_if_real
from tight_fit.techniques.rules import check_techniques
from tight_fit.techniques.step import AUTOCAST
from tight_fit.techniques.targets import QUERY_VALUE
from tight_fit.torch_private import disable_current_modes
from tight_fit.trace.fake_tensors import leave_meta

LENGTH = 512  # tokens per example, where nothing is said and the model takes that many


@dataclass(frozen=True)
class ModelStep:
    """One optimizer step of a model given by its configuration, as `Recipe` is for a course model.

    >>> from tight_fit import ModelStep
    >>> step = ModelStep.of("roberta-large", batch_size=32, accumulation=4, precision="bf16")
    >>> step.task, step.micro_batch
    ('sequence-classification', 8)

    The fields of `Recipe` mean what they mean there; the others are:

    config   transformers' configuration; the quantization that it asks for is left aside
    weights  dtype of the weights, "fp32", "bf16" or "fp16"; None takes the configuration's, or fp32
             where that is fp16 and all weights train. Adapters of LoRA are fp32, as peft makes them
    base     "nf4" keeps the linear layers in 4 bits with double quantization, frozen beside
             adapters (`language.four_bits`), and the rest in the dtype of `weights`, by default
             bf16, or fp16 with fp16's autocast; "fp32" and "bf16" are another word for `weights`
    kbit     with base="nf4": after peft's `prepare_model_for_kbit_training`, so that what is not
             quantized is fp32, the embeddings' output has a gradient, and layers are checkpointed
    lora_targets  layers that get adapters: "query-value", "all-linear", or names with commas
    lora_alpha, lora_scale  adapters are scaled by α / r or, with "alpha/sqrt(r)", by α / √r; α is
             2 r where it is None
    attention  "eager" or "sdpa"; None takes the library's own choice
    flash    whether the GPU has FlashAttention's kernel (from Ampere on); without it attention in
             bf16, and that of grouped queries before PyTorch 2.14, is written out
    loss     "chunked": cross entropy a chunk of tokens at a time (`language.chunked_loss`)
    compile  changes nothing here: the plan is that of the step without it
    offload, optimizer_in_backward, max_grad_norm  as in `Recipe`
    precision  autocast, as in `Recipe`; with "fp32" operations run in the dtype of the weights
    task     a key of `TASKS`; None takes the usual one (`hf_config.task_of`)
    length   tokens per example (text; of encoder and decoder alike); None takes 512, or fewer if
             the model takes fewer
    side     height and width of an image in pixels; None takes the configuration's, or 224
    classes  of a classifier; None takes the configuration's
    frozen   only for models with one stack of layers

    Raises ValueError or TypeError, in one sentence (CannotPlan is a ValueError).
    """

    config: PretrainedConfig = field(compare=False)
    batch_size: int = 16
    length: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    checkpointing: bool = False
    accumulation: int = 1
    frozen: int | None = None
    lora_rank: int | None = None
    task: str | None = None
    classes: int | None = None
    side: int | None = None
    weights: str | None = None
    base: str | None = None
    kbit: bool = False
    lora_targets: str = QUERY_VALUE
    lora_alpha: float | None = None
    lora_scale: str = "alpha/r"
    attention: str | None = None
    flash: bool = True
    loss: str = "full"
    compile: bool = False
    offload: str | None = None
    optimizer_in_backward: bool = False
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    peak_learning_rate: float = 2e-5

    def __post_init__(self):
        make_plain(self)
        true_or_false("kbit", self.kbit)
        if self.kbit:
            if self.base != "nf4":
                raise ValueError(
                    "kbit=True prepares weights in 4 bits for training: use base='nf4', or leave "
                    "kbit out."
                )
            object.__setattr__(self, "checkpointing", True)
        check_step(self)
        check_techniques(self)
        for name in ("classes", "side"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        config_bounds.check_sizes(self.config, self.classes)
        object.__setattr__(self, "task", hf_config.task_of(self.config, self.task))
        targets.check_targets(self.lora_targets)
        object.__setattr__(self, "weights", self._weights())
        if self.loss == "chunked" and self.task != "causal-lm":
            raise ValueError(
                f"loss='chunked' is for the next token (causal-lm), and the task is {self.task}: "
                "use loss='full'."
            )
        if self.classes is not None and not self.kind.classifies:
            raise ValueError(
                f"classes={self.classes} is for a classifier, and the task is {self.task}: leave "
                "classes out, or name such a task."
            )
        self._check_adapters()
        if self.length is not None and self.reads == "image":
            raise ValueError(
                f"length={self.length} is for text; an image's size is side: leave length out."
            )
        if self.side is not None and self.reads not in ("image", "pair"):
            raise ValueError(
                f"side={self.side} is for images; a text's size is length: leave side out."
            )

    def _check_adapters(self) -> None:
        """Raises ValueError for a rank above the width, and where all layers are frozen."""
        text = hf_config.text_config(self.config)
        width = getattr(text, "hidden_size", None)
        if self.lora_rank is None or not isinstance(width, int):
            return
        if self.lora_rank > width:
            raise ValueError(
                f"lora_rank={self.lora_rank} is more than the {width} columns of the matrices it "
                "adapts: choose a rank far below."
            )
        if self.frozen is not None and self.frozen == getattr(text, "num_hidden_layers", None):
            raise ValueError(
                f"lora_rank={self.lora_rank} has nothing to adapt with frozen={self.frozen}: all "
                "layers are frozen; lower frozen, or leave lora_rank out."
            )

    def _weights(self) -> str:
        """The dtype of the weights. Raises ValueError for fp16 weights that train."""
        trained = self.lora_rank is None
        if self.base == "nf4" and self.weights is None:
            return "fp16" if self.precision == "fp16" else "bf16"
        if self.base in hf_config.WEIGHTS:
            if self.weights not in (None, self.base):
                raise ValueError(
                    f"base={self.base!r} and weights={self.weights!r} are two dtypes for the same "
                    "weights: leave one out."
                )
            return self.base
        if self.weights is None:
            stored = hf_config.stored_weights(self.config)
            return "fp32" if stored == "fp16" and trained else stored
        one_of("weights", self.weights, hf_config.WEIGHTS)
        if self.weights == "fp16" and trained:
            raise ValueError(
                "weights='fp16' cannot be trained, since their gradients overflow or vanish: use "
                "fp32 weights with precision fp16, bf16 weights, or LoRA beside fp16 weights."
            )
        return self.weights

    def on(self, capability: tuple[int, int]) -> ModelStep:
        """The step with the attention kernels of a GPU of that compute capability, (0, 0) for none.

        It differs from this one only where that changes something.
        """
        text = hf_config.text_config(self.config)
        heads = getattr(text, "num_attention_heads", None)
        grouped = getattr(text, "num_key_value_heads", None) not in (None, heads)
        older = (0, 0) < capability < (8, 0)
        flash = not (older and (grouped or "bf16" in (self.precision, self.weights)))
        return self if flash == self.flash else replace(self, flash=flash)

    @classmethod
    def of(cls, model: PretrainedConfig | str | Path, **fields: Any) -> ModelStep:
        """The step of a model given in any way that `models.config.read` knows, such as its name.

        Raises what it and `ModelStep` raise.
        """
        return cls(hf_config.read(model), **fields)

    @property
    def kind(self) -> Task:
        """What the task is, from `TASKS`."""
        assert self.task is not None, "set when the step was made"
        return TASKS[self.task]

    @property
    def reads(self) -> str:
        """What the model reads: "text", "texts", "image" or "pair"."""
        return self.kind.reads

    @property
    def micro_batch(self) -> int:
        """Examples per forward pass."""
        return self.batch_size // self.accumulation

    @property
    def tokens(self) -> int | None:
        """Tokens per example (text), None for images."""
        if self.reads == "image":
            return None
        most = getattr(hf_config.text_config(self.config), "max_position_embeddings", None)
        return self.length or (min(LENGTH, most) if isinstance(most, int) and most > 0 else LENGTH)


class Logits(NamedTuple):
    """What the course's step reads from a model's answer."""

    logits: torch.Tensor


class FlatLogits(nn.Module):
    """A model whose logits have one row per label, [labels, classes], for the course's step.

    Of a segmentation they are [examples, classes, height, width], at the size of the images; of
    pairs the similarities of each image with all texts, and of each text with all images.
    """

    def __init__(self, model: PreTrainedModel, task: str):
        super().__init__()
        self.model, self.task = model, task

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
    with disable_current_modes():
        model = on_meta(model_step)
    leave_meta(model, model_step.weights == "fp32")
    with as_if_real():
        return prepare(model, model_step, recompute)


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
        with model_changes.default_dtype(hf_config.WEIGHTS[model_step.weights or "fp32"]):
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
    if model_step.base == "nf4":
        compute = AUTOCAST.get(model_step.precision)
        four_bits.quantize(model, compute or hf_config.WEIGHTS[model_step.weights or "bf16"])
    if model_step.kbit:
        four_bits.rest_in_fp32(model)
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
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # peft makes adapters in the dtype of their layer, then fp32
                parameter.data = parameter.data.float()
        frozen = _frozen_beside_adapters(model, model_step)
    model_changes.freeze(model, frozen)
    if model_step.loss == "chunked":
        put_in_chunks(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CannotPlan("Nothing is left to train.")
    assert model_step.task is not None, "set when the step was made"
    return FlatLogits(model, model_step.task).train()


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
