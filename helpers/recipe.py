"""The recipe: everything that decides a fine-tune, one field per technique.

A comparison is two recipes that differ in one field: `replace(before, accumulation=4)`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from helpers.values import one_of, real, true_or_false, whole

__all__ = ["Recipe", "StepSettings", "replace", "difference", "MODELS", "DATASETS"]


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


@dataclass(frozen=True)
class Recipe:
    """One fine-tune, complete. Equal recipes give equal weights, bit for bit, on the same CPU.

    model          "deberta", "deberta-large" (full profile only) or "vit"
    profile        "mini": the bundled small models; "full": the models that practitioners name
    weights        "pretrained" or "random"
    data           a key of DATASETS; None takes the profile's own
    train_size     examples of the training split to use; None takes all
    test_size      examples of the test split on which accuracy is measured, its classes in the
                   split's proportions; None takes all
    length         maximum length of an example in tokens, longer ones are cut (text only);
                   None takes 64 (mini) or 256 (full)
    padding        text only: "fixed" pads every example to `length`, "dynamic" to the longest of
                   its micro-batch, "uniform" also puts examples of similar length into one
                   micro-batch
    batch_size     examples per optimizer step
    accumulation   micro-batches per optimizer step; divides batch_size
    precision      "fp32"; "tf32" (fp32 storage, TF32 matrix products on GPUs that have them);
                   "bf16" (autocast); "fp16" (autocast with loss scaling; a step whose gradients
                   overflow is skipped)
    optimizer      "adamw"; "adamw8bit" (states in 8 bits, bitsandbytes); "adamw8bit_embed32" (the
                   same, but 32 bits for the embeddings' states); "sgd" (momentum 0.9);
                   "adafactor" (no momentum); "lion"; "lion8bit"
    checkpointing  recompute each layer's activations in the backward pass
    frozen         None trains everything; k freezes the embeddings and the first k layers
                   (0 freezes the embeddings alone)
    lora_rank      None trains the weights; r freezes them, and trains the head and adapters of
                   rank r beside the query and value projections, scaled by 2, in the layers that
                   `frozen` does not freeze
    steps          optimizer steps
    learning_rate  peak learning rate; None takes the model's own, which suits AdamW on all weights
    weight_decay   on every parameter that trains; decoupled from the gradient, except with "sgd"
    warmup         fraction of the steps in which the learning rate rises linearly from 0; after
                   them it falls linearly to 0
    max_grad_norm  gradients are clipped to this L2 norm
    seed           of the new head, the order of the examples and dropout

    Raises ValueError or TypeError, in one sentence, for a value that makes no fine-tune.
    """

    model: str = "deberta"
    profile: str = "mini"
    weights: str = "pretrained"
    data: str | None = None
    train_size: int | None = None
    test_size: int | None = 500
    length: int | None = None
    batch_size: int = 16
    accumulation: int = 1
    padding: str = "fixed"
    precision: str = "fp32"
    optimizer: str = "adamw"
    checkpointing: bool = False
    frozen: int | None = None
    lora_rank: int | None = None
    steps: int = 60
    learning_rate: float | None = None
    weight_decay: float = 0.01
    warmup: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self):
        self._check_model()
        self._check_data()
        check_step(self)
        self._check_layers()
        self._check_schedule()

    def _check_model(self) -> None:
        one_of("model", self.model, MODELS)
        one_of("profile", self.profile, PROFILES)
        one_of("weights", self.weights, WEIGHTS)
        if self.profile not in MODELS[self.model].data:
            raise ValueError(
                f"model={self.model!r} exists only in the full profile: use profile='full'."
            )

    def _check_data(self) -> None:
        one_of("padding", self.padding, PADDINGS)
        if self.data is not None:
            one_of("data", self.data, DATASETS)
            if DATASETS[self.data].task != self.task:
                suitable = [name for name, data in DATASETS.items() if data.task == self.task]
                raise ValueError(
                    f"model={self.model!r} reads {self.task}s, data={self.data!r} does not hold "
                    f"any: use one of {', '.join(suitable)}."
                )
        for name in ("train_size", "test_size"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        if self.task == "image":
            self._check_no_text_fields()
        elif self.length is not None:
            whole("length", self.length, 3)
            if self.length > MAX_LENGTH:
                raise ValueError(
                    f"length={self.length} is longer than the {MAX_LENGTH} tokens the models take."
                )

    def _check_no_text_fields(self) -> None:
        if self.length is not None:
            raise ValueError(
                f"length={self.length} is for text; an image model's length follows from its image "
                "and patch sizes: leave it out."
            )
        if self.padding != "fixed":
            raise ValueError(
                f"padding={self.padding!r} is for text; images have no padding: leave it out."
            )

    def _check_layers(self) -> None:
        if self.frozen is not None and self.frozen > self.layers:
            raise ValueError(
                f"frozen={self.frozen} is more than the {self.layers} layers of "
                f"model={self.model!r} in the {self.profile} profile."
            )
        if self.lora_rank is None:
            return
        width = MODELS[self.model].width[self.profile]
        if self.lora_rank > width:
            raise ValueError(
                f"lora_rank={self.lora_rank} is more than the {width} columns of the matrices it "
                "adapts: an adapter of full rank is larger than the matrix; choose a rank far "
                "below."
            )
        if self.frozen == self.layers:
            raise ValueError(
                f"lora_rank={self.lora_rank} has nothing to adapt with frozen={self.frozen}: all "
                "layers are frozen; lower frozen, or leave lora_rank out to train the head alone."
            )

    def _check_schedule(self) -> None:
        whole("steps", self.steps, 1)
        whole("seed", self.seed, 0)
        if self.learning_rate is not None:
            real("learning_rate", self.learning_rate, above=0)
        real("warmup", self.warmup, at_least=0)
        if self.warmup > 1:
            raise ValueError(
                f"warmup={self.warmup} is a fraction of the steps: give a number from 0 to 1."
            )

    @property
    def task(self) -> str:
        """What the model reads: "text" or "image"."""
        return MODELS[self.model].task

    @property
    def dataset(self) -> str:
        """Name of the data set, the profile's own where the recipe names none."""
        return self.data or MODELS[self.model].data[self.profile]

    @property
    def classes(self) -> int:
        """Classes of the data set."""
        return DATASETS[self.dataset].classes

    @property
    def layers(self) -> int:
        """Transformer layers of the model."""
        return MODELS[self.model].layers[self.profile]

    @property
    def tokens(self) -> int | None:
        """Maximum length of an example in tokens (text), None for images."""
        return (self.length or LENGTH[self.profile]) if self.task == "text" else None

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate at the end of the warm-up: `learning_rate`, or the model's own."""
        return self.learning_rate or MODELS[self.model].learning_rate[self.profile]

    @property
    def micro_batch(self) -> int:
        """Examples per forward pass."""
        return self.batch_size // self.accumulation

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The recipe of `to_dict`. Raises ValueError for a field that no recipe has."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"A recipe has no field {', '.join(unknown)}.")
        return cls(**values)


def difference(before: Recipe, after: Recipe) -> dict[str, tuple[Any, Any]]:
    """{field: (value before, value after)} for every field in which the two recipes differ."""
    values = {
        field.name: (getattr(before, field.name), getattr(after, field.name))
        for field in fields(Recipe)
    }
    return {name: (old, new) for name, (old, new) in values.items() if old != new}
