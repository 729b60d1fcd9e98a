"""The recipe: everything that decides a fine-tune, one field a technique.

A comparison is two recipes that differ in one field: `replace(before, accumulation=4)`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

from helpers.values import one_of, real, whole

__all__ = ["Recipe", "replace", "difference", "MODELS", "DATASETS"]


class Model(NamedTuple):
    """What a recipe may name as its model, and the settings that suit it when the recipe says nothing."""

    task: str  # "text" or "image"
    data: dict[str, str]  # profile -> data set
    learning_rate: dict[str, float]  # profile -> peak learning rate of AdamW
    layers: dict[str, int]  # profile -> transformer layers
    width: dict[str, int]  # profile -> hidden size


class DataSet(NamedTuple):
    task: str
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


@dataclass(frozen=True)
class Recipe:
    """One fine-tune, complete: two equal recipes give the same weights, bit for bit, on the same CPU.

    model          "deberta", "deberta-large" (full profile only) or "vit"
    profile        "mini": the bundled small models; "full": the models that practitioners name
    weights        "pretrained" or "random"
    data           a key of DATASETS; None takes the profile's own
    train_size     rows of the training split to use; None takes all
    test_size      rows of the test split to measure accuracy on, in its class shares; None takes all
    length         most tokens a row, longer ones are cut (text only); None takes 64 (mini) or 256 (full)
    padding        text only: "fixed" pads every row to `length`, "dynamic" to the longest of its micro-batch,
                   "uniform" also puts rows of like length into one micro-batch
    batch_size     rows an optimizer step
    accumulation   micro-batches an optimizer step; divides batch_size
    precision      "fp32", "tf32" (fp32 storage, TF32 matrix products on GPUs that have them), "bf16" (autocast) or
                   "fp16" (autocast, with the loss scaled; steps whose gradients overflow are skipped)
    optimizer      "adamw"; "adamw8bit" (its states in 8 bits, bitsandbytes), "adamw8bit_embed32" (those of the
                   embeddings in 32); "sgd" (momentum 0.9), "adafactor" (no momentum), "lion", "lion8bit"
    checkpointing  recompute each layer's activations in the backward pass
    frozen         None trains everything; k freezes the embeddings and the first k layers (0: the embeddings alone)
    lora_rank      None trains the weights; r freezes them and trains adapters of rank r beside the query and value
                   projections (of the layers that `frozen` leaves), scaled by 2, and the head
    steps          optimizer steps
    learning_rate  peak rate; None takes the model's own, which suits AdamW on all weights
    weight_decay   on every parameter that trains; decoupled from the gradient, except with "sgd"
    warmup         share of the steps in which the rate rises from 0; it then falls to 0 linearly
    max_grad_norm  gradients are clipped to this L2 norm
    seed           of the new head, the order of the rows and dropout

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
        one_of("model", self.model, MODELS)
        one_of("profile", self.profile, PROFILES)
        one_of("weights", self.weights, WEIGHTS)
        one_of("precision", self.precision, PRECISIONS)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("padding", self.padding, PADDINGS)
        if self.profile not in MODELS[self.model].data:
            raise ValueError(
                f"model={self.model!r} exists only in the full profile: use profile='full'."
            )
        if self.data is not None:
            one_of("data", self.data, DATASETS)
            if DATASETS[self.data].task != self.task:
                fit = [name for name, data in DATASETS.items() if data.task == self.task]
                raise ValueError(
                    f"model={self.model!r} reads {self.task}s, data={self.data!r} does not hold any: "
                    f"use one of {', '.join(fit)}."
                )
        for name in ("batch_size", "accumulation", "steps"):
            whole(name, getattr(self, name), 1)
        whole("seed", self.seed, 0)
        for name in ("train_size", "test_size"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        if self.length is not None:
            if self.task == "image":
                raise ValueError(
                    f"length={self.length} is for text; an image model's length follows from its "
                    "picture and patch sizes: leave it out."
                )
            whole("length", self.length, 3)
            if self.length > MAX_LENGTH:
                raise ValueError(
                    f"length={self.length} is longer than the {MAX_LENGTH} tokens the models take."
                )
        if self.padding != "fixed" and self.task == "image":
            raise ValueError(
                f"padding={self.padding!r} is for text; pictures have no padding: leave it out."
            )
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"accumulation={self.accumulation} does not divide batch_size={self.batch_size}: "
                "micro-batches must be equal; choose a divisor of the batch size."
            )
        if not isinstance(self.checkpointing, bool):
            raise TypeError(f"checkpointing={self.checkpointing!r} must be True or False.")
        if self.frozen is not None:
            whole("frozen", self.frozen, 0)
            if self.frozen > self.layers:
                raise ValueError(
                    f"frozen={self.frozen} is more than the {self.layers} layers of model={self.model!r} "
                    f"in the {self.profile} profile."
                )
        if self.lora_rank is not None:
            self._check_lora()
        if self.learning_rate is not None:
            real("learning_rate", self.learning_rate, above=0)
        real("weight_decay", self.weight_decay, at_least=0)
        real("max_grad_norm", self.max_grad_norm, above=0)
        real("warmup", self.warmup, at_least=0)
        if self.warmup > 1:
            raise ValueError(
                f"warmup={self.warmup} is a share of the steps: give a number from 0 to 1."
            )

    def _check_lora(self) -> None:
        whole("lora_rank", self.lora_rank, 1)
        width = MODELS[self.model].width[self.profile]
        if self.lora_rank > width:
            raise ValueError(
                f"lora_rank={self.lora_rank} is more than the {width} columns of the matrices it adapts: "
                "an adapter of full rank is larger than the matrix; choose a rank far below."
            )
        if self.frozen == self.layers:
            raise ValueError(
                f"lora_rank={self.lora_rank} has nothing to adapt with frozen={self.frozen}: all layers are "
                "frozen; lower frozen, or leave lora_rank out to train the head alone."
            )

    @property
    def task(self) -> str:
        """ "text" or "image"."""
        return MODELS[self.model].task

    @property
    def dataset(self) -> str:
        """Name of the data set, the profile's own where the recipe names none."""
        return self.data or MODELS[self.model].data[self.profile]

    @property
    def classes(self) -> int:
        return DATASETS[self.dataset].classes

    @property
    def layers(self) -> int:
        """Transformer layers of the model."""
        return MODELS[self.model].layers[self.profile]

    @property
    def tokens(self) -> int | None:
        """Tokens a row (text), None for images."""
        return (self.length or LENGTH[self.profile]) if self.task == "text" else None

    @property
    def rate(self) -> float:
        """Peak learning rate."""
        return self.learning_rate or MODELS[self.model].learning_rate[self.profile]

    @property
    def micro_batch(self) -> int:
        """Rows a forward pass."""
        return self.batch_size // self.accumulation

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Recipe:
        """Raises ValueError for a field that no recipe has."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"A recipe has no field {', '.join(unknown)}.")
        return cls(**values)


def difference(before: Recipe, after: Recipe) -> dict[str, tuple]:
    """{field: (before, after)} for every field in which the two differ."""
    pairs = {
        field.name: (getattr(before, field.name), getattr(after, field.name))
        for field in fields(Recipe)
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
