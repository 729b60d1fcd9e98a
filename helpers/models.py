"""DeBERTa and ViT with a classification head, full size or mini, and what a recipe does to them."""

from __future__ import annotations

import re
from collections.abc import Container
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from transformers import (
    AutoTokenizer,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

try:
    from transformers.initialization import no_init_weights
except ImportError:  # older releases keep it here
    from transformers.modeling_utils import no_init_weights

from helpers import hub
from helpers.data import Pixels
from helpers.recipe import Recipe

MINI = Path(__file__).parent / "mini"
REPOS = {
    "deberta": "microsoft/deberta-v3-base",
    "deberta-large": "microsoft/deberta-v3-large",
    "vit": "google/vit-base-patch16-224-in21k",
}
TARGETS = {
    "text": ("query_proj", "value_proj"),
    "image": ("q_proj", "v_proj"),
}  # what adapters stand beside
CLASSES = {"text": DebertaV2ForSequenceClassification, "image": ViTForImageClassification}
NEW_HEADS = ("classifier.", "pooler.dense.")  # what a checkpoint without a head leaves to be made

# The published configurations (config.json of each repository), so that a plan needs no network.
# He et al. 2021, https://arxiv.org/abs/2111.09543; Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929
_DEBERTA_V3 = dict(
    vocab_size=128100,
    type_vocab_size=0,
    max_position_embeddings=512,
    layer_norm_eps=1e-7,
    relative_attention=True,
    position_buckets=256,
    max_relative_positions=-1,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type=["p2c", "c2p"],
    position_biased_input=False,
    pooler_dropout=0,
    pooler_hidden_act="gelu",
)
_FULL = {
    "deberta": lambda: DebertaV2Config(
        **_DEBERTA_V3,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        pooler_hidden_size=768,
    ),
    "deberta-large": lambda: DebertaV2Config(
        **_DEBERTA_V3,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        pooler_hidden_size=1024,
    ),
    "vit": lambda: ViTConfig(
        image_size=224,
        patch_size=16,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
    ),
}


def config(recipe: Recipe) -> PretrainedConfig:
    """The architecture a recipe asks for, with its number of classes. Reads no network."""
    if recipe.profile == "mini":
        kind = DebertaV2Config if recipe.task == "text" else ViTConfig
        found = kind.from_pretrained(MINI / recipe.model)
    else:
        found = _FULL[recipe.model]()
    found.num_labels = recipe.classes
    found.problem_type = (
        "single_label_classification"  # else the library looks at the labels to guess it
    )
    return found


def source(recipe: Recipe) -> Path:
    """The folder of the pretrained checkpoint, fetched from the hub if need be. Raises hub.HubUnavailable."""
    return (
        MINI / recipe.model
        if recipe.profile == "mini"
        else hub.find("model", REPOS[recipe.model]).path
    )


def build(recipe: Recipe, device: str | torch.device = "cpu") -> PreTrainedModel:
    """The model of a recipe in fp32 on `device`, in training mode, every parameter trainable that is not frozen.

    Sets torch's global seed to `recipe.seed`, so that a new head is the same each time. Raises hub.HubUnavailable
    (no pretrained weights to be had) and RuntimeError (a checkpoint that lacks more than the head).
    """
    torch.manual_seed(recipe.seed)
    kind = CLASSES[recipe.task]
    if recipe.weights == "random":
        model = kind(config(recipe))
    else:
        where = source(recipe)
        with _quiet():
            model, info = kind.from_pretrained(
                where,
                config=config(recipe),
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=any(where.glob("*.safetensors")),
            )
        lost = sorted(name for name in info["missing_keys"] if not name.startswith(NEW_HEADS))
        if lost:
            raise RuntimeError(
                f"The checkpoint {where.name} lacks {len(lost)} tensors of the model ({lost[0]}, ...): "
                "it belongs to another architecture, or is damaged."
            )
    return prepare(model, recipe).to(device)


def empty(recipe: Recipe, recompute=nullcontext) -> PreTrainedModel:
    """The same model without values: for FakeTensorMode, which must be active. Takes no memory and no network.

    `recompute()` makes the context that checkpointed layers are run in for the second time.
    """
    with no_init_weights():
        model = CLASSES[recipe.task](config(recipe))
    # peft moves its adapters to where the layer is; tensors without values are there, and cannot be moved.
    with patch.object(torch.nn.Module, "to", lambda module, *args, **kwargs: module):
        return prepare(model, recipe, recompute)


def prepare(model: PreTrainedModel, recipe: Recipe, recompute=nullcontext) -> PreTrainedModel:
    """What the recipe's fields do to a model, in place."""
    # Heads of this family swallow num_items_in_batch; without this, Trainer multiplies their gradients by the
    # number of accumulation steps (huggingface/transformers#47688).
    model.accepts_loss_kwargs = False
    if recipe.checkpointing:
        # The non-reentrant kind: the other one loses gradients in silence when the embeddings are frozen.
        enable = (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), recompute())})
        # The library also makes the embeddings' output ask for a gradient, which only the reentrant kind needs: the
        # backward pass would go through every frozen layer.
        model.disable_input_require_grads()
    if recipe.lora_rank is not None:
        add_adapters(model, recipe)
    frozen = frozen_names(model, recipe)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    check_trainable(model, frozen)
    return model.train()


def add_adapters(model: PreTrainedModel, recipe: Recipe) -> None:
    """Put adapters of `recipe.lora_rank` beside the query and value projections, in place, with peft.

    LoRA, Hu et al. 2021: x W + (α/r) x A B, A drawn at random (peft: Kaiming uniform), B zero, so that nothing changes
    at first; α = 2 r, no dropout. Layers that the recipe freezes get none.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes a second or two to import

    layers = list(range(recipe.frozen or 0, recipe.layers))
    inject_adapter_in_model(
        LoraConfig(
            r=recipe.lora_rank,
            lora_alpha=2 * recipe.lora_rank,
            target_modules=list(TARGETS[recipe.task]),
            layers_to_transform=layers,
        ),
        model,
    )


def frozen_names(model: torch.nn.Module, recipe: Recipe) -> set[str]:
    """Names of the parameters that the recipe freezes: the embeddings' and the first `recipe.frozen` layers'; with
    `lora_rank` all but the adapters' and the head's.

    DeBERTa's relative position embeddings and their LayerNorm, which lie in the encoder, are among the embeddings: every
    layer reads them, so while they train the backward pass has to go through all layers, frozen or not.
    """
    if recipe.lora_rank is not None:
        return {
            name
            for name, _ in model.named_parameters()
            if "lora_" not in name and not name.startswith(NEW_HEADS)
        }
    if recipe.frozen is None:
        return set()
    layers = "|".join(map(str, range(recipe.frozen)))
    embeddings = r"\w+\.embeddings\.|\w+\.encoder\.(rel_embeddings|LayerNorm)\."
    below = re.compile(
        rf"{embeddings}|\w+\.(encoder\.)?layers?\.({layers})\." if layers else embeddings
    )
    return {name for name, _ in model.named_parameters() if below.match(name)}


def check_trainable(model: torch.nn.Module, frozen: Container[str] = ()) -> None:
    """Raises RuntimeError when a parameter that should train, all but the `frozen` ones, is not fp32 or does not train."""
    for name, parameter in model.named_parameters():
        if name in frozen:
            continue
        if parameter.dtype != torch.float32:
            raise RuntimeError(
                f"{name} was loaded as {parameter.dtype}: load with dtype=torch.float32, half-precision "
                "weights under AdamW lose small updates or end in NaN."
            )
        if not parameter.requires_grad:
            raise RuntimeError(f"{name} does not train although the recipe does not freeze it.")


@contextmanager
def _quiet():
    """The library reports a new head as missing weights; here that is checked instead of printed."""
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


def processor(recipe: Recipe):
    """What turns the recipe's rows into tensors: a tokenizer for text, the folder of the image settings for pictures.

    With weights="random" the mini tokenizer stands in where the full one cannot be had, so that a machine without a
    hub can still run the full architecture. Raises hub.HubUnavailable.
    """
    try:
        where = source(recipe)
    except hub.HubUnavailable:
        if recipe.weights != "random":
            raise
        if recipe.task == "image":
            return Pixels(side=config(recipe).image_size)
        where = MINI / "deberta"
    return (
        AutoTokenizer.from_pretrained(where, local_files_only=True)
        if recipe.task == "text"
        else where
    )
