"""Any Hugging Face model from its configuration alone: which class trains it, and what it reads.

Nothing here reads weights or runs code that a repository carries. What cannot be planned raises
`CannotPlan`, in one sentence that says why.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto as auto

from helpers import hub, models
from helpers.values import one_of


class CannotPlan(ValueError):
    """This model, or this technique on it, cannot be planned; the message says why."""


class Task(NamedTuple):
    """What a model may be trained for."""

    mapping: str  # transformers' table of the classes for it
    reads: str  # "text", "texts" (of an encoder and a decoder) or "image"
    each: str  # what one label belongs to: "example" or "token"

    @property
    def classifies(self) -> bool:
        """Whether labels are classes, so that the head is new; else they are tokens."""
        return "CLASSIFICATION" in self.mapping


TASKS = {
    "sequence-classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "text", "example"),
    "token-classification": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "text", "token"),
    "masked-lm": Task("MODEL_FOR_MASKED_LM_MAPPING", "text", "token"),
    "causal-lm": Task("MODEL_FOR_CAUSAL_LM_MAPPING", "text", "token"),
    "seq2seq-lm": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "texts", "token"),
    "image-classification": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "image", "example"),
}
IMAGE_SIDE = 224  # pixels, where the configuration says nothing (convolutional networks)
PUBLISHED = {repo: models.CONFIGS / name for name, repo in models.REPOS.items()}
# How weights are stored: left aside, because the step trains fp32 ones.
WEIGHTS_ONLY = ("quantization_config", "dtype", "torch_dtype")


def read(source: PretrainedConfig | str | Path) -> PretrainedConfig:
    """A copy of a configuration, from an object, a folder, a config.json, or a name on the hub.

    A name is looked up among the configurations that the course ships, in TIGHT_FIT_MIRROR, in the
    hub's cache, and on the hub, of which only config.json is fetched. Raises hub.HubUnavailable,
    FileNotFoundError, CannotPlan.
    """
    if isinstance(source, PretrainedConfig):
        return copy.deepcopy(source)
    path = Path(source).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _from_file(path / "config.json" if path.is_dir() else path)
    name = str(source)
    if name in PUBLISHED:
        return _from_file(PUBLISHED[name] / "config.json")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise FileNotFoundError(
            f"model={name!r} is neither a folder, nor a config.json, nor a name of the hub's form "
            "owner/name."
        )
    return _from_file(_on_the_hub(name) / "config.json")


def _on_the_hub(name: str) -> Path:
    """The folder with the config.json of a repository, from the mirror, the cache or the hub."""
    repo = hub.Repo(name, "model", ("main",), ("config.json",), (("config.json",),))
    copy_here = hub.in_mirror(repo) or hub.in_cache(repo)
    if copy_here:
        return copy_here.path
    problem = hub.unreachable(repo)
    if problem is None:
        problem, fetched = hub.download(repo)
        if fetched:
            return fetched.path
    raise hub.HubUnavailable(
        f"The configuration of {name} cannot be had ({problem}; neither {hub.MIRROR} nor the cache "
        "has it): connect to the internet, give a folder or a config.json instead of the name, or "
        f"one of {', '.join(PUBLISHED)}."
    )


def _from_file(path: Path) -> PretrainedConfig:
    """The configuration in a config.json. Raises FileNotFoundError, CannotPlan."""
    try:
        values = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no file {path}: give the folder or the config.json of a model."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CannotPlan(f"{path} is not JSON ({error}).") from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind is None:
        raise CannotPlan(
            f"{path} has no model_type: it is not the configuration of a transformers model."
        )
    if kind not in CONFIG_MAPPING:
        why = (
            "its code lives in its repository, which is never run here"
            if "auto_map" in values
            else "it may be newer, or misspelt"
        )
        raise CannotPlan(f"model_type={kind!r} is not known to the installed transformers: {why}.")
    for name in WEIGHTS_ONLY:
        values.pop(name, None)
    try:
        return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # each configuration class checks in its own way
        raise CannotPlan(
            f"{path} is refused by transformers' {kind} configuration: {sentence(error)}"
        ) from error


def task_of(config: PretrainedConfig, task: str | None = None) -> str:
    """The task to plan: the `task` asked for, else what config.architectures was trained for.

    Without either the usual one of its kind: classification for encoders and vision models, the
    next token for decoders. Raises ValueError for a task that is not in `TASKS`, and CannotPlan for
    one that this architecture has no class for.
    """
    able = {name: kind for name in TASKS if (kind := class_of(config, name))}
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
        if kind.__name__ in named and name != "masked-lm":
            return name
    usual = ["image-classification", "sequence-classification", "causal-lm", "token-classification"]
    if config.is_encoder_decoder:
        usual = ["seq2seq-lm"]
    elif "causal-lm" in able and ("masked-lm" not in able or getattr(config, "is_decoder", False)):
        usual = ["causal-lm"]
    for name in usual:
        if name in able:
            return name
    raise CannotPlan(
        f"{config.model_type} models are no text encoder, decoder or encoder-decoder and no image "
        "classifier that transformers has a class for: those are what can be planned."
    )


def class_of(config: PretrainedConfig, task: str) -> type | None:
    """The class that transformers has for a task, None where it has none."""
    mapping = getattr(auto, TASKS[task].mapping)
    if type(config) not in mapping:
        return None
    kinds = mapping[type(config)]
    if not isinstance(kinds, (tuple, list)):
        return kinds
    named = set(config.architectures or ())
    return next((kind for kind in kinds if kind.__name__ in named), kinds[0])


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part that says how the decoder reads text, in models that also read other things."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def image_shape(config: PretrainedConfig, side: int | None = None) -> tuple[int, int, int]:
    """(channels, height, width) of an image; `side` in pixels replaces the configuration's."""
    size = side or getattr(config, "image_size", None) or IMAGE_SIDE
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return getattr(config, "num_channels", 3), height, width


def most_positions(model: torch.nn.Module, config: PretrainedConfig) -> int | None:
    """The longest example in tokens that the model takes, None where nothing limits it."""
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


# The query and value projections by the names that libraries give them, fused ones last.
QUERY_VALUE = (
    ("query_proj", "value_proj"),
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("q", "v"),
    ("q_lin", "v_lin"),
    ("Wqkv",),
    ("query_key_value",),
    ("qkv_proj",),
    ("qkv",),
    ("c_attn",),
)


def adapted(model: torch.nn.Module) -> list[str]:
    """Last parts of the names of the query and value projections, beside which adapters stand.

    Raises CannotPlan where no known name is among the model's.
    """
    there = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }
    for names in QUERY_VALUE:
        if there.issuperset(names):
            return list(names)
    raise CannotPlan(
        f"LoRA stands beside the query and value projections, and {type(model).__name__} has none "
        "whose name is known: leave lora_rank out."
    )


def sentence(error: BaseException) -> str:
    """An error's message on one line, at most 300 characters, with a full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300] + ("" if text.endswith(".") else ".")
