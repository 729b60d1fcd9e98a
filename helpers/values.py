"""What the fields of a recipe may hold, and the sentence that refuses everything else.

The names that exist, checks of single values, and checks of whole steps and recipes. Each error
says in one sentence what is wrong and what helps. `name` is the name under which the user knows a
value; it begins the message.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple, Protocol


class Model(NamedTuple):
    """A model that a recipe may name, and what a recipe takes from it when it says nothing."""

    task: str  # "text" or "image"
    data: dict[str, str]  # profile -> data set
    learning_rate: dict[str, float]  # profile -> peak learning rate of AdamW
    layers: dict[str, int]  # profile -> transformer layers
    width: dict[str, int]  # profile -> hidden size


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
    ),
    "deberta-large": Model(
        "text", {"full": "newsgroups"}, {"full": 1e-5}, {"full": 24}, {"full": 1024}
    ),
    "vit": Model(
        "image",
        {"mini": "digits", "full": "cifar10"},
        {"mini": 1e-3, "full": 5e-5},
        {"mini": 4, "full": 12},
        {"mini": 96, "full": 768},
    ),
}
DATASETS = {
    "r8": DataSet("text", 8),
    "newsgroups": DataSet("text", 20),
    "digits": DataSet("image", 10),
    "cifar10": DataSet("image", 10),
}
PROFILES = ("mini", "full")
WEIGHTS = ("pretrained", "random")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("adamw", "adamw8bit", "adamw8bit_embed32", "sgd", "adafactor", "lion", "lion8bit")
PADDINGS = ("fixed", "dynamic", "uniform")
LENGTH = {"mini": 64, "full": 256}
MAX_LENGTH = 512


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
        raise ValueError(f"{name}={value!r} is not known: use one of {', '.join(known)}.")


def true_or_false(name: str, value: object) -> None:
    """Raises TypeError where `value` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False.")


def whole(name: str, value: object, least: int) -> int:
    """Gives `value` as an int. Raises TypeError for no whole number, ValueError below `least`."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}.")
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
        raise TypeError(f"{name}={value!r} must be a number.")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite.")
    if above is not None and value <= above:
        raise ValueError(f"{name}={value} must be above {above}.")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}.")
    return value


class StepSettings(Protocol):
    """What one optimizer step reads from its settings: a `Recipe`, or a `ModelStep` of any model.

    The fields mean what they mean in `Recipe`. Both kinds are dataclasses, so `replace` takes both.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def batch_size(self) -> int: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def length(self) -> int | None: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def precision(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def checkpointing(self) -> bool: ...
    @property
    def frozen(self) -> int | None: ...
    @property
    def lora_rank(self) -> int | None: ...
    @property
    def peak_learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def max_grad_norm(self) -> float: ...


def check_step(settings: StepSettings) -> None:
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
        if DATASETS[recipe.data].task != recipe.task:
            suitable = [name for name, data in DATASETS.items() if data.task == recipe.task]
            raise ValueError(
                f"model={recipe.model!r} reads {recipe.task}s, data={recipe.data!r} does not hold "
                f"any: use one of {', '.join(suitable)}."
            )
    for name in ("train_size", "test_size"):
        if getattr(recipe, name) is not None:
            whole(name, getattr(recipe, name), 1)
    if recipe.task == "image":
        _check_no_text_fields(recipe)
    elif recipe.length is not None:
        whole("length", recipe.length, 3)
        if recipe.length > MAX_LENGTH:
            raise ValueError(
                f"length={recipe.length} is longer than the {MAX_LENGTH} tokens the models take."
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
    whole("seed", recipe.seed, 0)
    if recipe.learning_rate is not None:
        real("learning_rate", recipe.learning_rate, above=0)
    real("warmup", recipe.warmup, at_least=0)
    if recipe.warmup > 1:
        raise ValueError(
            f"warmup={recipe.warmup} is a fraction of the steps: give a number from 0 to 1."
        )
