"""DeBERTa and ViT with a classification head, full size or mini, and what a recipe does to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoTokenizer,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.initialization import no_init_weights

from helpers import hub, model_changes
from helpers.data import Pixels
from helpers.model_changes import Recompute, as_if_real
from helpers.recipe import Recipe

MINI = Path(__file__).parent / "mini"
# The published config.json of each full model, as far as it decides the architecture, so that a
# plan needs no network. DeBERTa-v3: He et al. 2021, https://arxiv.org/abs/2111.09543; ViT:
# Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929.
CONFIGS = Path(__file__).parent / "configs"
REPOS = {
    "deberta": "microsoft/deberta-v3-base",
    "deberta-large": "microsoft/deberta-v3-large",
    "vit": "google/vit-base-patch16-224-in21k",
}
CLASSES: dict[str, Any] = {  # transformers annotates what these classes return only in part
    "text": DebertaV2ForSequenceClassification,
    "image": ViTForImageClassification,
}
TARGETS = {"text": ("query_proj", "value_proj"), "image": ("q_proj", "v_proj")}  # of LoRA adapters
NEW_HEADS = ("classifier.", "pooler.dense.")  # parameters that a checkpoint without a head lacks


def config(recipe: Recipe) -> PretrainedConfig:
    """The architecture that a recipe asks for, with its number of classes. Needs no network."""
    kind = DebertaV2Config if recipe.task == "text" else ViTConfig
    folder = MINI if recipe.profile == "mini" else CONFIGS
    architecture = kind.from_pretrained(folder / recipe.model)
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
    return prepare(model, recipe).to(device)  # type: ignore[arg-type]


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


def empty(recipe: Recipe, recompute: Recompute = nullcontext) -> PreTrainedModel:
    """The same model with shapes but no values, for FakeTensorMode, which must be active.

    Takes no memory and no network.

    recompute  makes the context in which a checkpointed layer runs for the second time
    """
    with no_init_weights():
        model = CLASSES[recipe.task](config(recipe))
    with as_if_real():
        return prepare(model, recipe, recompute)


def prepare(
    model: PreTrainedModel, recipe: Recipe, recompute: Recompute = nullcontext
) -> PreTrainedModel:
    """Apply checkpointing, LoRA and freezing as the recipe says, in place; in training mode."""
    # The forward pass of these models accepts num_items_in_batch but ignores it. Unless it is
    # declared so, Trainer multiplies their gradients by the number of accumulation steps
    # (huggingface/transformers#47688).
    model.accepts_loss_kwargs = False  # type: ignore[assignment]  # transformers declares no type
    if recipe.checkpointing:
        model_changes.enable_checkpointing(model, recompute)
    if recipe.lora_rank is not None:
        layers = range(recipe.frozen or 0, recipe.layers)
        model_changes.add_lora(model, recipe.lora_rank, TARGETS[recipe.task], layers)
    frozen = frozen_names(model, recipe)
    model_changes.freeze(model, frozen)
    model_changes.check_trainable(model, frozen)
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


@contextmanager
def quiet() -> Iterator[None]:
    """transformers prints neither warnings nor progress bars inside.

    It would report a new head as missing weights, which `build` checks itself.
    """
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


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
            return Pixels(side=config(recipe).image_size)
        folder = MINI / "deberta"
    if recipe.task == "image":
        return folder
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
