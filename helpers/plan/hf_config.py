"""Any Hugging Face model from its configuration alone: which class trains it, what it reads, where its layers are.

Nothing here reads weights or runs code that a repository carries. What cannot be planned raises `CannotPlan`, in one
sentence that says why.
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


class CannotPlan(ValueError):
    """This model, or this technique on it, cannot be planned; the message says why."""


class Task(NamedTuple):
    mapping: str  # transformers' table of the classes for it
    reads: str  # "text", "texts" (of an encoder and a decoder) or "image"
    each: str  # what one label belongs to: "row" or "token"


TASKS = {
    "sequence-classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "text", "row"),
    "token-classification": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "text", "token"),
    "masked-lm": Task("MODEL_FOR_MASKED_LM_MAPPING", "text", "token"),
    "causal-lm": Task("MODEL_FOR_CAUSAL_LM_MAPPING", "text", "token"),
    "seq2seq-lm": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "texts", "token"),
    "image-classification": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "image", "row"),
}
IMAGE_SIDE = 224  # pixels, where the configuration says nothing (convolutional networks)
PUBLISHED = {repo: models._FULL[name] for name, repo in models.REPOS.items()}
WEIGHTS_ONLY = (
    "quantization_config",
    "dtype",
    "torch_dtype",
)  # how weights are stored: the step trains fp32 ones


def read(source: PretrainedConfig | str | Path) -> PretrainedConfig:
    """A configuration from an object, a folder, a config.json, or a name on the hub.

    A name is looked up among the configurations the course ships, in TIGHT_FIT_MIRROR, in the hub's cache, and on the
    hub, of which only config.json is fetched. Raises hub.HubUnavailable, FileNotFoundError, CannotPlan.
    """
    if isinstance(source, PretrainedConfig):
        return copy.deepcopy(source)
    path = Path(source).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _from_file(path / "config.json" if path.is_dir() else path)
    name = str(source)
    if name in PUBLISHED:
        return PUBLISHED[name]()
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise FileNotFoundError(
            f"model={name!r} is neither a folder, nor a config.json, nor a name of the hub's form "
            "owner/name."
        )
    return _from_file(_on_the_hub(name) / "config.json")


def _on_the_hub(name: str) -> Path:
    repo = hub.Repo(name, "model", ("main",), ("config.json",), (("config.json",),))
    found = hub._in_mirror(repo) or hub._in_cache(repo)
    problem = "" if found else hub.unreachable(repo)
    if not found and problem is None:
        problem, found = hub._from_hub(repo)
    if not found:
        raise hub.HubUnavailable(
            f"The configuration of {name} cannot be had ({problem}; neither {hub.MIRROR} nor the cache has it): connect to the "
            f"internet, give a folder or a config.json instead of the name, or one of {', '.join(PUBLISHED)}."
        )
    return found.path


def _from_file(path: Path) -> PretrainedConfig:
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
            f"{path} is refused by transformers' {kind} configuration: {_sentence(error)}"
        ) from error


def task_of(config: PretrainedConfig, task: str | None = None) -> str:
    """The task to plan: the one asked for, the one config.architectures trained for, or the usual one of its kind (a
    classifier for encoders and vision models, the next token for decoders). Raises CannotPlan."""
    able = [name for name in TASKS if class_of(config, name)]
    if task is not None:
        if task not in TASKS:
            raise ValueError(f"task={task!r} is not known: use one of {', '.join(TASKS)}.")
        if task not in able:
            raise CannotPlan(
                f"transformers has no class of {config.model_type} for {task}"
                + (f": it has {', '.join(able)}." if able else " or any other task planned here.")
            )
        return task
    named = set(config.architectures or ())
    for name in able:
        if class_of(config, name).__name__ in named and name != "masked-lm":
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
        f"{config.model_type} models are no text encoder, decoder or encoder-decoder and no image classifier "
        "that transformers has a class for: those are what can be planned."
    )


def class_of(config: PretrainedConfig, task: str) -> type | None:
    """The class that transformers has for a task, None where it has none."""
    mapping = getattr(auto, TASKS[task].mapping)
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    if not isinstance(found, (tuple, list)):
        return found
    named = set(config.architectures or ())
    return next((kind for kind in found if kind.__name__ in named), found[0])


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part that says how the decoder reads text, in models that also read other things."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def image_shape(config: PretrainedConfig, side: int | None = None) -> tuple[int, int, int]:
    """(channels, height, width) of a picture."""
    size = side or getattr(config, "image_size", None) or IMAGE_SIDE
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return getattr(config, "num_channels", 3), height, width


def most_positions(model: torch.nn.Module, config: PretrainedConfig) -> int | None:
    """The longest row in tokens that the model takes, None where nothing limits it."""
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


def layer_stack(model: torch.nn.Module) -> str | None:
    """Name of the model's one list of layers, None where it has none or several (encoder and decoder, stages)."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == getattr(text_config(model.config), "num_hidden_layers", None)
    ]
    return lists[0] if len(lists) == 1 else None


# What adapters stand beside: query and value by the names that libraries give them, fused ones last.
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
    """Last parts of the names of the query and value projections. Raises CannotPlan where there are none."""
    there = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }
    for names in QUERY_VALUE:
        if there.issuperset(names):
            return list(names)
    raise CannotPlan(
        f"LoRA stands beside the query and value projections, and {type(model).__name__} has none whose name "
        "is known: leave lora_rank out."
    )


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300] + ("" if text.endswith(".") else ".")
