"""What the fields of a recipe may hold, and the sentence that refuses everything else.

The names that exist, checks of single values, and checks of whole steps and recipes. Each error
says in one sentence what is wrong and what helps. `name` is the name under which the user knows a
value; it begins the message.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from tight_fit.optimizer_kinds import OPTIMIZERS

T = TypeVar("T")


class Model(NamedTuple):
    """A model that a recipe may name, and what a recipe takes from it when it says nothing."""

    task: str  # "text" or "image" (a class per example), or "chat" (an answer in words)
    data: dict[str, str]  # profile -> data set
    learning_rate: dict[str, float]  # profile -> peak learning rate of AdamW
    layers: dict[str, int]  # profile -> transformer layers
    width: dict[str, int]  # profile -> hidden size
    positions: dict[str, int]  # profile -> most tokens of an example; empty for images


class DataSet(NamedTuple):
    """A data set that a recipe may name."""

    task: str  # "text" or "image"
    classes: int


MODELS = {
    "deberta": Model(
        "text",
        {"mini": "r8", "full": "newsgroups"},
        {"mini": 1e-3, "full": 2e-5},
        {"mini": 4, "full": 12},
        {"mini": 128, "full": 768},
        {"mini": 512, "full": 512},
    ),
    "deberta-large": Model(
        "text", {"full": "newsgroups"}, {"full": 1e-5}, {"full": 24}, {"full": 1024}, {"full": 512}
    ),
    "vit": Model(
        "image",
        {"mini": "digits", "full": "cifar10"},
        {"mini": 1e-3, "full": 5e-5},
        {"mini": 4, "full": 12},
        {"mini": 96, "full": 768},
        {},
    ),
    "decoder": Model(
        "chat",
        {"mini": "r8", "full": "newsgroups"},
        {"mini": 2e-3, "full": 1e-5},
        {"mini": 6, "full": 28},
        {"mini": 128, "full": 1024},
        {"mini": 512, "full": 40960},
    ),
    "decoder-1.7b": Model(
        "chat",
        {"full": "newsgroups"},
        {"full": 1e-5},
        {"full": 28},
        {"full": 2048},
        {"full": 40960},
    ),
}
READS = {"text": "text", "image": "image", "chat": "text"}  # task of a model -> of its data
DATASETS = {
    "r8": DataSet("text", 8),
    "newsgroups": DataSet("text", 20),
    "digits": DataSet("image", 10),
    "cifar10": DataSet("image", 10),
}
IGNORE = -100  # a label per token that no loss counts: torch's cross_entropy skips it
PROFILES = ("mini", "full")
WEIGHTS = ("pretrained", "random")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PADDINGS = ("fixed", "dynamic", "uniform")
LENGTH = {"mini": 64, "full": 256}


# The largest whole number of a recipe: beyond it numbers of bytes no longer fit 64 bits.
MOST = 2**31 - 1
MOST_FLOAT = int(sys.float_info.max)
SMALLEST_FLOAT32 = 2.0**-126
MOST_SEED = 2**32 - 1  # of NumPy's generators
SHOWN = 60  # characters of a value in a message


def shown(value: object) -> str:
    """A value as Python writes it, cut where it is too long for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10 ** (SHOWN - 1):
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    return clipped(repr(value))


def clipped(text: str) -> str:
    """A text in one line, cut where it is too long for a message."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def plain(value: Any) -> Any:
    """A NumPy or torch scalar as Python's own bool, int or float; everything else as it is.

    So that what is kept, compared and written to JSON never depends on where a number came from.
    """
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def make_plain(settings: Any) -> None:
    """Replace the scalars of NumPy and torch in the fields of a frozen dataclass, in place."""
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        if plain(value) is not value:
            object.__setattr__(settings, name, plain(value))


def one_of(name: str, value: object, known: Collection[str]) -> None:
    """Raises ValueError where `value` is not among the `known` names, which the message lists."""
    if not isinstance(value, str) or value not in known:
        question = ""
        if isinstance(value, str) and len(value) < SHOWN:
            lower = {one.lower(): one for one in known}
            near = difflib.get_close_matches(value.lower(), lower, 1, 0.7)
            question = f" Did you mean {lower[near[0]]!r}?" if near else ""
        raise ValueError(
            f"{name}={shown(value)} is not known: use one of {', '.join(known)}.{question}"
        )


def of_type(name: str, value: T, kind: type) -> T:
    """Gives `value`. Raises TypeError where it is not of this kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, and is {shown(value)}.")
    return value


def each_of_type(name: str, value: Any, kind: type | tuple[type, ...]) -> None:
    """Raises TypeError where `value` is no dict from labels to such things, ValueError for none."""
    kinds = " or a ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, {{label: {kinds}}}, and is {shown(value)}.")
    if not value:
        raise ValueError(f"{name} is empty: give at least 1, {{label: {kinds}}}.")
    for label, one in value.items():
        if not isinstance(one, kind):
            raise TypeError(f"{name}[{shown(label)}] must be a {kinds}, and is {shown(one)}.")


def series(name: str, value: Any, *kinds: type, finite: bool = False) -> None:
    """Raises TypeError or ValueError where `value` is no dict {label: numbers}.

    kinds   what a label may have; what has no length is one number, or taken as it is
    finite  whether every number must be finite
    """
    each_of_type(name, value, kinds)
    for label, one in value.items():
        given = f"{name}[{shown(label)}]"
        if hasattr(one, "__len__") and not len(one):
            raise ValueError(f"{given} is empty: give at least one number.")
        for number in one if hasattr(one, "__len__") else ():
            if isinstance(plain(number), bool) or not isinstance(plain(number), (int, float)):
                raise TypeError(f"{given} holds {shown(number)}: give numbers.")
        for number in (one if hasattr(one, "__len__") else [one]) if finite else ():
            real(given, number)


def function(name: str, value: object) -> None:
    """Raises TypeError where `value` cannot be called."""
    if not callable(value):
        raise TypeError(f"{name}={shown(value)} must be a function.")


def true_or_false(name: str, value: object) -> None:
    """Raises TypeError where `value` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)} must be True or False.")


def whole(name: str, value: object, least: int, most: int = MOST) -> int:
    """Gives `value` as an int.

    Raises TypeError for no whole number, ValueError below `least` or above `most`.
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={shown(value)} must be a whole number.")
    if value < least:
        raise ValueError(f"{name}={shown(value)} must be at least {least}.")
    if value > most:
        raise ValueError(f"{name}={shown(value)} must be at most {most}.")
    return value


def real(
    name: str, value: object, above: float | None = None, at_least: float | None = None
) -> float:
    """Gives `value` as a number of Python's own.

    Raises TypeError for what is no number, ValueError for one out of bounds.

    above, at_least  bounds from below, without and with the bound itself; None for no bound
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={shown(value)} must be a number.")
    if isinstance(value, int) and abs(value) > MOST_FLOAT or not math.isfinite(value):
        raise ValueError(f"{name}={shown(value)} must be finite, as a float is.")
    if above is not None and value <= above:
        raise ValueError(f"{name}={shown(value)} must be above {above}.")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}={shown(value)} must be at least {at_least}.")
    return value


def check_step(settings: Any) -> None:
    """Raises ValueError or TypeError, in one sentence, for a step that cannot be taken."""
    one_of("precision", settings.precision, PRECISIONS)
    one_of("optimizer", settings.optimizer, OPTIMIZERS)
    whole("batch_size", settings.batch_size, 1)
    whole("accumulation", settings.accumulation, 1)
    if settings.batch_size % settings.accumulation:
        raise ValueError(
            f"accumulation={settings.accumulation} does not divide "
            f"batch_size={settings.batch_size}: micro-batches must be equal; "
            "choose a divisor of the batch size."
        )
    true_or_false("checkpointing", settings.checkpointing)
    for name, least in (("length", 1), ("frozen", 0), ("lora_rank", 1)):
        if getattr(settings, name) is not None:
            whole(name, getattr(settings, name), least)
    real("weight_decay", settings.weight_decay, at_least=0)
    if settings.max_grad_norm is not None:
        real("max_grad_norm", settings.max_grad_norm, above=0)


def check_recipe(recipe: Any) -> None:
    """Raises ValueError or TypeError, in one sentence, for a `Recipe` that makes no fine-tune."""
    _check_model(recipe)
    _check_data(recipe)
    check_step(recipe)
    _check_layers(recipe)
    _check_schedule(recipe)


def _check_model(recipe: Any) -> None:
    one_of("model", recipe.model, MODELS)
    one_of("profile", recipe.profile, PROFILES)
    one_of("weights", recipe.weights, WEIGHTS)
    if recipe.profile not in MODELS[recipe.model].data:
        raise ValueError(
            f"model={recipe.model!r} exists only in the full profile: use profile='full'."
        )


def _check_data(recipe: Any) -> None:
    one_of("padding", recipe.padding, PADDINGS)
    if recipe.data is not None:
        one_of("data", recipe.data, DATASETS)
        reads = READS[recipe.task]
        if DATASETS[recipe.data].task != reads:
            suitable = [name for name, data in DATASETS.items() if data.task == reads]
            raise ValueError(
                f"model={recipe.model!r} reads {reads}s, data={recipe.data!r} does not hold "
                f"any: use one of {', '.join(suitable)}."
            )
    for name in ("train_size", "test_size"):
        if getattr(recipe, name) is not None:
            whole(name, getattr(recipe, name), 1)
    if recipe.task == "image":
        _check_no_text_fields(recipe)
    elif recipe.length is not None:
        whole("length", recipe.length, 3)
        most = MODELS[recipe.model].positions[recipe.profile]
        if recipe.length > most:
            raise ValueError(
                f"length={recipe.length} is longer than the {most} tokens that "
                f"model={recipe.model!r} takes in the {recipe.profile} profile."
            )


def _check_no_text_fields(recipe: Any) -> None:
    if recipe.length is not None:
        raise ValueError(
            f"length={recipe.length} is for text; an image model's length follows from its image "
            "and patch sizes: leave it out."
        )
    if recipe.padding != "fixed":
        raise ValueError(
            f"padding={recipe.padding!r} is for text; images have no padding: leave it out."
        )


def _check_layers(recipe: Any) -> None:
    if recipe.frozen is not None and recipe.frozen > recipe.layers:
        raise ValueError(
            f"frozen={recipe.frozen} is more than the {recipe.layers} layers of "
            f"model={recipe.model!r} in the {recipe.profile} profile."
        )
    if recipe.lora_rank is None:
        return
    width = MODELS[recipe.model].width[recipe.profile]
    if recipe.lora_rank > width:
        raise ValueError(
            f"lora_rank={recipe.lora_rank} is more than the {width} columns of the matrices it "
            "adapts: an adapter of full rank is larger than the matrix; choose a rank far "
            "below."
        )
    if recipe.frozen == recipe.layers:
        raise ValueError(
            f"lora_rank={recipe.lora_rank} has nothing to adapt with frozen={recipe.frozen}: all "
            "layers are frozen; lower frozen, or leave lora_rank out to train the head alone."
        )


def _check_schedule(recipe: Any) -> None:
    whole("steps", recipe.steps, 1)
    whole("seed", recipe.seed, 0, MOST_SEED)
    if recipe.learning_rate is not None:
        real("learning_rate", recipe.learning_rate, above=0)
        if recipe.learning_rate < SMALLEST_FLOAT32:
            raise ValueError(
                f"learning_rate={recipe.learning_rate} is below the smallest number of float32, so "
                "that no weight would change: fine-tunes take 1e-6 to 1e-2."
            )
    real("warmup", recipe.warmup, at_least=0)
    if recipe.warmup > 1:
        raise ValueError(
            f"warmup={recipe.warmup} is a fraction of the steps: give a number from 0 to 1."
        )
