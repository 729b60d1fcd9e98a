"""The recipe: everything that decides a fine-tune, one field per technique.

A comparison is two recipes that differ in one field: `replace(before, accumulation=4)`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from helpers.values import DATASETS, LENGTH, MODELS, StepSettings, check_recipe, make_plain

__all__ = ["Recipe", "StepSettings", "replace", "difference", "MODELS", "DATASETS"]


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
        make_plain(self)
        check_recipe(self)

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
