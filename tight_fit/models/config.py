"""Any Hugging Face model from its configuration alone: which class trains it, and what it reads.

Nothing here reads weights or runs code that a repository carries. What cannot be planned raises
`CannotPlan`, in one sentence that says why. transformers is imported where it is asked, so that
what is `Remembered` of a configuration does without it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tight_fit.checks import one_of, shown
from tight_fit.models import bounds, hub
from tight_fit.models import names as model_names
from tight_fit.models.remembered import Kind, Remembered

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

Config: TypeAlias = "PretrainedConfig | Remembered"


class CannotPlan(ValueError):
    """This model, or this technique on it, cannot be planned; the message says why."""


class Task(NamedTuple):
    """What a model may be trained for."""

    mapping: str  # transformers' table of the classes for it, without MODEL_FOR_ and _MAPPING
    reads: str  # "text", "texts" (of an encoder and a decoder), "image", "pair" (image and text),
    # "images" (in a text) or "speech" (and the text of a decoder)
    each: str  # what one label belongs to: "example", "token" or "pixel"
    classifies: bool = False  # whether labels are classes, so that the head is new


TASKS = {
    "sequence-classification": Task("SEQUENCE_CLASSIFICATION", "text", "example", True),
    "token-classification": Task("TOKEN_CLASSIFICATION", "text", "token", True),
    "masked-lm": Task("MASKED_LM", "text", "token"),
    "causal-lm": Task("CAUSAL_LM", "text", "token"),
    "seq2seq-lm": Task("SEQ_TO_SEQ_CAUSAL_LM", "texts", "token"),
    "image-classification": Task("IMAGE_CLASSIFICATION", "image", "example", True),
    "semantic-segmentation": Task("SEMANTIC_SEGMENTATION", "image", "pixel", True),
    "image-text-to-text": Task("IMAGE_TEXT_TO_TEXT", "images", "token"),
    "speech-to-text": Task("SPEECH_SEQ_2_SEQ", "speech", "token"),
    "contrastive": Task("ZERO_SHOT_IMAGE_CLASSIFICATION", "pair", "example"),
    # A language model as well, trained on what is preferred or rewarded (`techniques.preferences`).
    "dpo": Task("CAUSAL_LM", "text", "token"),
    "grpo": Task("CAUSAL_LM", "text", "token"),
}
LANGUAGE_MODELS = ("causal-lm", "dpo", "grpo")  # tasks whose loss is one of next tokens
IMAGE_SIDE = 224  # pixels, where the configuration says nothing (convolutional networks)
NAMED_DTYPES = ("float32", "bfloat16", "float16", "auto")
WEIGHTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # with PyTorch's names


def read(source: Config | str | Path) -> PretrainedConfig:
    """A copy of a configuration, from an object, a folder, a config.json, or a name on the hub.

    A name is looked up among the configurations that come with the package, in TIGHT_FIT_MIRROR, in
    the hub's cache, and on the hub, of which only config.json is fetched. Raises
    hub.HubUnavailable, FileNotFoundError, CannotPlan.
    """
    if isinstance(source, Remembered):
        return from_values(source.values, source.name)
    if not isinstance(source, str | Path):
        from transformers import PretrainedConfig  # takes seconds, and names need none of it

        if isinstance(source, PretrainedConfig):
            return copy.deepcopy(source)
    try:
        values = dict(model_names.values_of(source))
    except ValueError as error:
        raise CannotPlan(str(error)) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError | hub.HubUnavailable):
            raise
        why = error.strerror or str(error)
        raise CannotPlan(f"{shown(str(source))} cannot be read: {why}.") from None
    return from_values(values, str(source))


def from_values(values: dict[str, Any], source: str) -> PretrainedConfig:
    """The configuration that the values of a config.json describe; `source` is its name in errors.

    Raises CannotPlan.
    """
    from transformers import CONFIG_MAPPING  # takes seconds

    from tight_fit.models import odd

    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        why = (
            "its code lives in its repository, which is never run here"
            if "auto_map" in values
            else "it may be newer, or misspelt"
        )
        raise CannotPlan(
            f"model_type={shown(kind)} is not known to the installed transformers: {why}."
        )
    values = dict(values)
    quantized = values.pop("quantization_config", None)
    try:
        bounds.check_values(values)
    except ValueError as error:
        raise CannotPlan(f"{source}: {error}") from None
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # each configuration class checks in its own way
        raise CannotPlan(
            f"{source} is refused by transformers' {kind} configuration: "
            f"{sentence(error)[:-1]}{odd.hint(kind, values)}."
        ) from error
    config.stored_quantized = isinstance(quantized, dict)
    return config


def task_of(config: Config, task: str | None = None) -> str:
    """The task to plan: the `task` asked for, else what config.architectures was trained for.

    Without either the usual one of its kind: classification for encoders and vision models, the
    next token for decoders. Raises ValueError for a task that is not in `TASKS`, and CannotPlan for
    one that this architecture has no class for.
    """
    able = {name: kind for name in TASKS if (kind := kind_of(config, name))}
    if task is not None:
        one_of("task", task, TASKS)
        if task not in able:
            raise CannotPlan(
                f"transformers has no class of {config.model_type} for {task}"
                + (f": it has {', '.join(able)}." if able else " or any other task planned here.")
            )
        return task
    named = set(config.architectures or ())
    for name, kind in able.items():
        if kind.name in named and name != "masked-lm":
            return name
    usual = ["contrastive", "image-classification", "sequence-classification", "causal-lm"]
    usual += ["token-classification", "image-text-to-text"]
    if config.is_encoder_decoder:
        usual = ["seq2seq-lm", "speech-to-text"]
    elif "causal-lm" in able and ("masked-lm" not in able or getattr(config, "is_decoder", False)):
        usual = ["causal-lm"]
    for name in usual:
        if name in able:
            return name
    raise CannotPlan(
        f"transformers has no class of {config.model_type} for any task that is planned: "
        f"{', '.join(TASKS)}."
    )


def named_task(config: Config) -> str | None:
    """The task of `TASKS` whose class config.architectures names; None where it names none."""
    named = set(config.architectures or ())
    for name in TASKS:
        kind = kind_of(config, name)
        if kind is not None and kind.name in named:
            return name
    return None


def weights_of(config: Config) -> str:
    """The dtype in which the configuration says that weights are stored: a key of `WEIGHTS`."""
    dtype = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    names = {theirs: name for name, theirs in WEIGHTS.items()}
    return names.get(str(dtype).removeprefix("torch."), "fp32")


def stored_weights(config: Config) -> str:
    """As `weights_of`. Raises CannotPlan for a dtype that is none of `WEIGHTS`."""
    dtype = getattr(config, "dtype", None)
    if dtype is not None and str(dtype).removeprefix("torch.") not in NAMED_DTYPES:
        raise CannotPlan(
            f"The configuration stores weights as {shown(str(dtype))}, which is not planned: name "
            "fp32, bf16 or fp16 as weights."
        )
    return weights_of(config)


def kind_of(config: Config, task: str) -> Kind | None:
    """What is to be known of the class that transformers has for a task, None where it has none."""
    if isinstance(config, Remembered):
        return config.kinds.get(task)
    kind = class_of(config, task)
    return None if kind is None else Kind(kind.__name__, getattr(kind, "_supports_sdpa", False))


def class_of(config: PretrainedConfig, task: str) -> type | None:
    """The class that transformers has for a task, None where it has none."""
    from transformers.models.auto import modeling_auto as auto

    mapping = getattr(auto, f"MODEL_FOR_{TASKS[task].mapping}_MAPPING")
    if type(config) not in mapping:
        return None
    kinds = mapping[type(config)]
    if not isinstance(kinds, (tuple, list)):
        return kinds
    named = set(config.architectures or ())
    return next((kind for kind in kinds if kind.__name__ in named), kinds[0])


def text_config(config: Config) -> Any:
    """The part that says how the decoder reads text, in models that also read other things."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def image_shape(config: Config, side: int | None = None) -> tuple[int, int, int]:
    """(channels, height, width) of an image; `side` in pixels replaces the configuration's."""
    config = getattr(config, "vision_config", config)
    size = side or getattr(config, "image_size", None) or IMAGE_SIDE
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return getattr(config, "num_channels", 3), height, width


def most_positions(model: torch.nn.Module, config: PretrainedConfig) -> int | None:
    """The longest example in tokens that the model takes, None where nothing limits it."""
    import torch

    most = getattr(text_config(config), "max_position_embeddings", None)
    for name, module in model.named_modules():  # RoBERTa's positions begin after the padding's
        if (
            isinstance(module, torch.nn.Embedding)
            and "position" in name
            and module.padding_idx is not None
            and most
        ):
            most = min(most, module.num_embeddings - module.padding_idx - 1)
    return most if isinstance(most, int) and most > 0 else None


def sentence(error: BaseException) -> str:
    """An error's message on one line, at most 300 characters, with a full stop."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):  # whose text is the key alone
        text = f"{type(error).__name__} {text}".strip()
    return text[:300] + ("" if text.endswith(".") else ".")


def remember(config: PretrainedConfig) -> Remembered:
    """What answers read of a configuration, for those that come later."""
    parts = {"text": text_config(config), "vision": getattr(config, "vision_config", None)}
    kinds = {task: kind for task in TASKS if (kind := kind_of(config, task))}
    return Remembered.of(config, parts, kinds)
