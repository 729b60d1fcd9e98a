"""Any Hugging Face model: the settings of its step, and the model, with or without values."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from helpers import model_changes, models
from helpers.model_changes import Recompute, as_if_real
from helpers.plan import hf_config
from helpers.plan.hf_config import TASKS, CannotPlan, Task
from helpers.torch_private import disable_current_modes, storage_key
from helpers.values import check_step, make_plain, whole

LENGTH = 512  # tokens per example, where nothing is said and the model takes that many


@dataclass(frozen=True)
class ModelStep:
    """One optimizer step of a model given by its configuration, as `Recipe` is for a course model.

    The fields of `Recipe` mean what they mean there; the others are:

    config   transformers' configuration; the dtype and the quantization that it asks for are
             ignored: weights are fp32
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
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    peak_learning_rate: float = 2e-5

    def __post_init__(self):
        make_plain(self)
        check_step(self)
        for name in ("classes", "side"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        object.__setattr__(self, "task", hf_config.task_of(self.config, self.task))
        if self.length is not None and self.reads == "image":
            raise ValueError(
                f"length={self.length} is for text; an image's size is side: leave length out."
            )
        if self.side is not None and self.reads != "image":
            raise ValueError(
                f"side={self.side} is for images; a text's size is length: leave side out."
            )

    @property
    def kind(self) -> Task:
        """What the task is, from `TASKS`."""
        assert self.task is not None, "set when the step was made"
        return TASKS[self.task]

    @property
    def reads(self) -> str:
        """What the model reads: "text", "texts" or "image"."""
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
    """A model whose logits come as [labels, classes], one row per label, for the course's step."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, **inputs) -> Logits:
        return Logits(self.model(**inputs).logits.flatten(0, -2))


def empty(model_step: ModelStep, recompute: Recompute = nullcontext) -> FlatLogits:
    """The model without values, as `models.empty`; FakeTensorMode must be active."""
    with disable_current_modes(), torch.device("meta"), no_init_weights(), models.quiet():
        model = make(model_step)
        model.tie_weights()
    _leave_meta(model)
    with as_if_real():
        return prepare(model, model_step, recompute)


def make(model_step: ModelStep) -> PreTrainedModel:
    """The model with random weights. Raises CannotPlan where transformers cannot make it.

    Raises ValueError for a length that the model does not take.
    """
    config = _config(model_step)
    assert model_step.task is not None, "set when the step was made"
    kind = hf_config.class_of(config, model_step.task)
    assert kind is not None, "else the task would have been refused"
    try:
        model = kind(config)
    except Exception as error:  # a missing library, sizes that do not fit: each its own type
        raise CannotPlan(
            f"transformers cannot make this {config.model_type} model: {hf_config.sentence(error)}"
        ) from error
    most = hf_config.most_positions(model, config)
    if model_step.tokens is not None and most is not None and model_step.tokens > most:
        raise ValueError(
            f"length={model_step.tokens} is longer than the {most} tokens this model takes."
        )
    return model


def _config(model_step: ModelStep) -> PretrainedConfig:
    """The step's configuration as it is trained."""
    config = hf_config.read(model_step.config)
    config._attn_implementation = None  # the library's own choice, whatever the file asks for
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


def _leave_meta(model: nn.Module) -> None:
    """Replace each parameter and buffer on the meta device by a fake tensor of its shape, in place.

    Tensors that shared a storage share one again. Half-precision ones become fp32.
    """
    replaced: dict[int, torch.Tensor] = {}  # by the tensor's id: tied ones are replaced once
    storages: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor.untyped_storage())
        if key not in storages:
            storages[key] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return torch.empty(tensor.shape, dtype=torch.float32)
        view = storages[key].view(tensor.dtype)
        return view.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def replacement(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replaced:
            new = fake(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            replaced[id(tensor)] = new
        return replaced[id(tensor)]

    with torch.no_grad():
        for module in model.modules():
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for table in tables:
                for name, tensor in list(table.items()):
                    if tensor is not None:
                        table[name] = replacement(tensor)


def prepare(
    model: PreTrainedModel, model_step: ModelStep, recompute: Recompute = nullcontext
) -> FlatLogits:
    """What the fields do to a model, in place, as `models.prepare`.

    Raises CannotPlan for a field that this model does not allow.
    """
    if model_step.checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise CannotPlan(
                f"{type(model).__name__} has no gradient checkpointing: leave checkpointing out."
            )
        model_changes.enable_checkpointing(model, recompute)
    frozen = _frozen_names(model, model_step)
    if model_step.lora_rank is not None:
        layers = None
        if model_step.frozen is not None:
            layers = range(model_step.frozen, hf_config.text_config(model.config).num_hidden_layers)
        model_changes.add_lora(model, model_step.lora_rank, hf_config.adapted(model), layers)
        frozen = _frozen_beside_adapters(model, model_step)
    model_changes.freeze(model, frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CannotPlan("Nothing is left to train.")
    return FlatLogits(model).train()


def _frozen_names(model: PreTrainedModel, model_step: ModelStep) -> set[str]:
    """The embeddings and the first `frozen` layers, as `models.frozen_names`."""
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
