"""A stranger's model: on real tensors or without values, and what the fields of its step do to it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from transformers import PretrainedConfig

from helpers import models
from helpers.plan import hf_config
from helpers.plan.hf_config import TASKS, CannotPlan
from helpers.recipe import OPTIMIZERS, PRECISIONS
from helpers.torch_private import disable_current_modes, storage_key
from helpers.values import one_of, whole

LENGTH = 512  # tokens a row, where nothing is said and the model takes that many


@dataclass(frozen=True)
class ModelStep:
    """One optimizer step of a model given by its configuration; the fields of `Recipe` mean what they mean there.

    config         transformers' configuration; its own precision and quantization are left aside: weights are fp32
    task           one of `TASKS`; None takes the usual one (`architectures.task_of`)
    length         tokens a row (text; of encoder and decoder alike); None takes 512, or fewer if the model takes fewer
    side           pixels, height and width of a picture; None takes the configuration's, or 224
    classes        of a classifier; None takes the configuration's
    frozen         for models with one stack of layers
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
        one_of("precision", self.precision, PRECISIONS)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("batch_size", "accumulation"):
            whole(name, getattr(self, name), 1)
        for name, least in (
            ("length", 1),
            ("frozen", 0),
            ("lora_rank", 1),
            ("classes", 1),
            ("side", 1),
        ):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least)
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"accumulation={self.accumulation} does not divide batch_size={self.batch_size}: "
                "micro-batches must be equal; choose a divisor of the batch size."
            )
        if not isinstance(self.checkpointing, bool):
            raise TypeError(f"checkpointing={self.checkpointing!r} must be True or False.")
        object.__setattr__(self, "task", hf_config.task_of(self.config, self.task))
        if self.length is not None and self.reads == "image":
            raise ValueError(
                f"length={self.length} is for text; a picture's size is side: leave length out."
            )
        if self.side is not None and self.reads != "image":
            raise ValueError(
                f"side={self.side} is for pictures; a text's size is length: leave side out."
            )

    @property
    def reads(self) -> str:
        """ "text", "texts" or "image"."""
        return TASKS[self.task].reads

    @property
    def micro_batch(self) -> int:
        """Rows a forward pass."""
        return self.batch_size // self.accumulation

    @property
    def tokens(self) -> int | None:
        """Tokens a row (text), None for images."""
        if self.reads == "image":
            return None
        most = getattr(hf_config.text_config(self.config), "max_position_embeddings", None)
        return self.length or (min(LENGTH, most) if isinstance(most, int) and most > 0 else LENGTH)


class Logits(NamedTuple):
    logits: torch.Tensor


class Flat(nn.Module):
    """A model whose logits come as [rows, classes], a row for every label: what the course's step reads."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs) -> Logits:
        return Logits(self.model(**inputs).logits.flatten(0, -2))


def empty(model_step: ModelStep, recompute=nullcontext) -> nn.Module:
    """The model without values, as `models.empty`; FakeTensorMode must be active."""
    with disable_current_modes(), torch.device("meta"), models.no_init_weights(), models._quiet():
        model = make(model_step)
        model.tie_weights()
    _leave_meta(model)
    # peft moves its adapters to where the layer is; tensors without values are there, and cannot be moved.
    with patch.object(nn.Module, "to", lambda module, *args, **kwargs: module):
        return prepare(model, model_step, recompute)


def make(model_step: ModelStep) -> nn.Module:
    config = hf_config.read(model_step.config)
    config._attn_implementation = None  # the library's own choice, whatever the file asks for
    if model_step.classes is not None:
        config.num_labels = model_step.classes
    config.problem_type = (
        "single_label_classification"  # else the library looks at the labels to guess it
    )
    if model_step.reads != "image":
        config.use_cache = False  # as Trainer sets it: keys and values are kept for generation only
        text = hf_config.text_config(config)
        if (
            model_step.task == "sequence-classification"
            and getattr(text, "pad_token_id", None) is None
        ):
            text.pad_token_id = config.pad_token_id = (
                0  # decoders look for the last token that is no padding
            )
    try:
        model = hf_config.class_of(config, model_step.task)(config)
    except CannotPlan:
        raise
    except (
        Exception
    ) as error:  # each architecture fails in its own way: a library missing, sizes that do not fit
        raise CannotPlan(
            f"transformers cannot make this {config.model_type} model: {hf_config._sentence(error)}"
        ) from error
    most = hf_config.most_positions(model, config)
    if model_step.reads != "image" and most is not None and model_step.tokens > most:
        raise ValueError(
            f"length={model_step.tokens} is longer than the {most} tokens this model takes."
        )
    return model


def _leave_meta(model: nn.Module) -> None:
    """Give every parameter and buffer a fake tensor of its sizes; what shared a storage shares it again."""
    kept: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in kept:
            key = storage_key(tensor.untyped_storage())
            if key not in storages:
                storages[key] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
            dtype = (
                torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
            )
            if dtype != tensor.dtype:
                new = torch.empty(tensor.shape, dtype=dtype)
            else:
                new = (
                    storages[key]
                    .view(dtype)
                    .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                )
            kept[id(tensor)] = (
                nn.Parameter(new, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else new
            )
        return kept[id(tensor)]

    with torch.no_grad():
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                table.update(
                    {name: moved(tensor) for name, tensor in table.items() if tensor is not None}
                )


def prepare(model: nn.Module, model_step: ModelStep, recompute=nullcontext) -> nn.Module:
    """What the fields do to a model, in place, as `models.prepare`; the model comes back as `Flat`."""
    if model_step.checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise CannotPlan(
                f"{type(model).__name__} has no gradient checkpointing: leave checkpointing out."
            )
        enable = (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), recompute())})
        model.disable_input_require_grads()
    base = f"{model.base_model_prefix}."
    new = (
        ""
        if TASKS[model_step.task].each == "token" and model_step.task != "token-classification"
        else base
    )
    frozen = _frozen_names(model, model_step)
    if model_step.lora_rank is not None:
        _add_adapters(model, model_step)
        # the head that a checkpoint lacks trains; a language model's head is pretrained
        frozen = {
            name
            for name, _ in model.named_parameters()
            if "lora_" not in name and (not new or name.startswith(base))
        }
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CannotPlan("Nothing is left to train.")
    return Flat(model).train()


def _add_adapters(model: nn.Module, model_step: ModelStep) -> None:
    from peft import LoraConfig, inject_adapter_in_model  # takes a second or two to import

    layers = None
    if model_step.frozen is not None:
        count = len(model.get_submodule(hf_config.layer_stack(model)))
        layers = list(range(model_step.frozen, count))
    inject_adapter_in_model(
        LoraConfig(
            r=model_step.lora_rank,
            lora_alpha=2 * model_step.lora_rank,
            target_modules=hf_config.adapted(model),
            layers_to_transform=layers,
            fan_in_fan_out=False,
        ),
        model,
    )


def _frozen_names(model: nn.Module, model_step: ModelStep) -> set[str]:
    """The embeddings (all that comes before the layers, and every nn.Embedding) and the first k layers."""
    if model_step.frozen is None:
        return set()
    stack = hf_config.layer_stack(model)
    if stack is None:
        raise CannotPlan(
            f"frozen={model_step.frozen} counts the layers of one stack, and {type(model).__name__} has none or "
            "several: leave frozen out."
        )
    count = len(model.get_submodule(stack))
    if model_step.frozen > count:
        raise ValueError(
            f"frozen={model_step.frozen} is more than the {count} layers of this model."
        )
    names = [name for name, _ in model.named_parameters()]
    first = next(place for place, name in enumerate(names) if name.startswith(f"{stack}."))
    below = set(names[:first]) | {
        name for name in names for k in range(model_step.frozen) if name.startswith(f"{stack}.{k}.")
    }
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    # DeBERTa's LayerNorm of the relative positions, read by every layer, belongs to the embeddings
    return below | tables.intersection(names) | models.frozen_names(model, _Embeddings())


class _Embeddings(NamedTuple):
    lora_rank: None = None
    frozen: int = 0
