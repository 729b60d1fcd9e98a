"""The course's classifiers and decoders, full size or mini, and what a recipe does to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoTokenizer,
    DebertaV2ForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
    ViTForImageClassification,
)
from transformers.initialization import no_init_weights

from helpers.recipe import Recipe
from tight_fit.models import hub
from tight_fit.packages import needs
from tight_fit.techniques import base_weights, eight_bits, model_changes
from tight_fit.techniques.chunked_loss import put_in_chunks
from tight_fit.techniques.compiled import compiled
from tight_fit.techniques.model_changes import as_if_real, quiet
from tight_fit.techniques.targets import targets_of

if TYPE_CHECKING:
    from helpers.data import Pixels

MINI = Path(__file__).parent / "mini"
# The published config.json of each full model, as far as it decides the architecture, so that a
# plan needs no network. DeBERTa-v3: He et al. 2021, https://arxiv.org/abs/2111.09543; ViT:
# Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929; Qwen3: Yang et al. 2025,
# https://arxiv.org/abs/2505.09388 (its weights are under the Apache License 2.0).
CONFIGS = Path(__file__).parent / "configs"
REPOS = {
    "deberta": "microsoft/deberta-v3-base",
    "deberta-large": "microsoft/deberta-v3-large",
    "vit": "google/vit-base-patch16-224-in21k",
    "decoder": "Qwen/Qwen3-0.6B",
    "decoder-1.7b": "Qwen/Qwen3-1.7B",
}
CLASSES: dict[str, Any] = {  # transformers annotates what these classes return only in part
    "text": DebertaV2ForSequenceClassification,
    "image": ViTForImageClassification,
    "chat": Qwen3ForCausalLM,
}
TARGETS = {  # of LoRA adapters
    "text": ("query_proj", "value_proj"),
    "image": ("q_proj", "v_proj"),
    "chat": ("q_proj", "v_proj"),
}
NEW_HEADS = ("classifier.", "pooler.dense.")  # parameters that a checkpoint without a head lacks


def config(recipe: Recipe) -> PretrainedConfig:
    """The architecture that a recipe asks for, with its number of classes. Needs no network."""
    folder = MINI if recipe.profile == "mini" else CONFIGS
    architecture = CLASSES[recipe.task].config_class.from_pretrained(folder / recipe.model)
    architecture._attn_implementation = recipe.attention
    if recipe.task == "chat":
        architecture.use_cache = False  # keys and values are kept for generation only
        return architecture
    architecture.num_labels = recipe.classes
    # The library would otherwise guess it from the labels' dtype.
    architecture.problem_type = "single_label_classification"
    return architecture


def source(recipe: Recipe) -> Path:
    """The folder of the pretrained checkpoint, fetched from the hub if it is not on this machine.

    Raises hub.HubUnavailable.
    """
    if recipe.profile == "mini":
        return MINI / recipe.model
    return hub.find("model", REPOS[recipe.model]).path


def build(recipe: Recipe, device: str | torch.device = "cpu") -> PreTrainedModel:
    """The model of a recipe on `device`, in fp32 and training mode; all trains that is not frozen.

    Sets torch's global seed to `recipe.seed`, so that a new head is the same each time. Raises
    hub.HubUnavailable where there are no pretrained weights to be had, and RuntimeError for a
    checkpoint that lacks more than the head.
    """
    torch.manual_seed(recipe.seed)
    if recipe.weights == "random":
        model = CLASSES[recipe.task](config(recipe))
    else:
        model = _pretrained(recipe)
    # transformers decorates `to`, and the decorator has the wrong type.
    model = prepare(model, recipe).to(device)  # type: ignore[arg-type]
    return compiled(model) if recipe.compile else model


def _pretrained(recipe: Recipe) -> PreTrainedModel:
    folder = source(recipe)
    with quiet():
        model, info = CLASSES[recipe.task].from_pretrained(
            folder,
            config=config(recipe),
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=any(folder.glob("*.safetensors")),
        )
    lost = sorted(name for name in info["missing_keys"] if not name.startswith(NEW_HEADS))
    if lost:
        raise RuntimeError(
            f"The checkpoint {folder.name} lacks {len(lost)} tensors of the model ({lost[0]}, "
            "...): it belongs to another architecture, or is damaged."
        )
    return model


def empty(recipe: Recipe) -> PreTrainedModel:
    """The same model with shapes but no values, for FakeTensorMode, which must be active.

    Takes no memory and no network.
    """
    with no_init_weights():
        model = CLASSES[recipe.task](config(recipe))
        model.tie_weights()
    with as_if_real():
        return prepare(model, recipe)


def prepare(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """What the recipe does to a model, in place; in training mode."""
    # The forward pass of DeBERTa, as of most classifiers, accepts num_items_in_batch but ignores
    # it. Unless it is declared so, Trainer multiplies the gradients by the number of accumulation
    # steps (huggingface/transformers#47688; by_hand.trainer_factors measures it).
    model.accepts_loss_kwargs = False  # type: ignore[assignment]  # transformers declares no type
    if recipe.checkpointing:
        model_changes.enable_checkpointing(model)
    if recipe.loss == "chunked":
        put_in_chunks(model)
    if recipe.float8 is not None:
        eight_bits.multiply_in_8_bits(model, recipe.float8)
    if recipe.base != "fp32":
        base_weights.store(model, recipe, NEW_HEADS)
    if recipe.lora_rank is not None:
        layers = range(recipe.frozen or 0, recipe.layers)
        needs("peft")
        targets = targets_of(model, recipe.lora_targets)
        scale = recipe.lora_alpha, recipe.lora_scale
        model_changes.add_lora(model, recipe.lora_rank, targets, layers, *scale)
        base_weights.widen_adapters(model)
    frozen = frozen_names(model, recipe)
    model_changes.freeze(model, frozen)
    whole = recipe.base == "fp32" or recipe.lora_rank is not None
    model_changes.check_trainable(model, frozen, torch.float32 if whole else torch.bfloat16)
    return model.train()


def frozen_names(model: torch.nn.Module, recipe: Recipe) -> set[str]:
    """Names of the parameters that the recipe freezes.

    Those of the embeddings and of the first `recipe.frozen` layers; with `lora_rank` all but those
    of the adapters and the head.
    """
    if recipe.lora_rank is not None:
        names = {name for name, _ in model.named_parameters() if "lora_" not in name}
        return {name for name in names if not name.startswith(NEW_HEADS)}
    if recipe.frozen is None:
        return set()
    stack = model_changes.layer_stack(model, recipe.layers)
    assert stack is not None, "each of the course's models has one stack of layers"
    return model_changes.embeddings_and_layers(model, stack, recipe.frozen)


def processor(recipe: Recipe) -> PreTrainedTokenizerBase | Path | Pixels:
    """What turns the recipe's examples into tensors.

    A tokenizer for text; for images the folder of the checkpoint's image settings, or the settings
    themselves. With weights="random" the mini tokenizer replaces the full one where that cannot be
    had, so that a machine without the hub can still run the full architecture. Raises
    hub.HubUnavailable.
    """
    try:
        folder = source(recipe)
    except hub.HubUnavailable:
        if recipe.weights != "random":
            raise
        if recipe.task == "image":
            from helpers.data import Pixels  # it imports datasets, which a plan does not need

            return Pixels(side=config(recipe).image_size)
        folder = MINI / ("decoder" if recipe.task == "chat" else "deberta")
    if recipe.task == "image":
        return folder
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
