"""The recipe: everything that decides a fine-tune, one field per technique.

A comparison is two recipes that differ in one field: `replace(before, accumulation=4)`.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tight_fit.checks import (
    DATASETS,
    LENGTH,
    MODELS,
    check_recipe,
    clipped,
    make_plain,
    of_type,
    shown,
)
from tight_fit.techniques.rules import check_techniques_of

__all__ = ["Recipe", "replace", "difference", "MODELS", "DATASETS"]


@dataclass(frozen=True)
class Recipe:
    """One fine-tune, complete. Equal recipes give equal weights, bit for bit, on the same CPU.

    model          "deberta", "deberta-large" (full profile only), "vit", or a language model:
                   "decoder", "decoder-1.7b" (full profile only)
    profile        "mini": the bundled small models; "full": the models that practitioners name
    weights        "pretrained" or "random"
    data           a key of DATASETS; None takes the profile's own
    train_size     examples of the training split to use; None takes all
    test_size      examples of the test split on which accuracy is measured, its classes in the
                   split's proportions; None takes all
    length         maximum length of an example in tokens, longer ones are cut (not for images); of
                   a conversation only the text is cut; None takes 64 (mini) or 256 (full)
    padding        not for images: "fixed" pads every example to `length`, "dynamic" to the longest
                   of its micro-batch, "uniform" also puts examples of similar length together
    batch_size     examples per optimizer step
    accumulation   micro-batches per optimizer step; divides batch_size
    precision      "fp32"; "tf32" (fp32 storage, TF32 matrix products on GPUs that have them);
                   "bf16" (autocast); "fp16" (autocast with loss scaling; a step whose gradients
                   overflow is skipped)
    optimizer      "adamw"; "adamw8bit" (states in 8 bits, bitsandbytes); "adamw8bit_embed32" (the
                   same, but 32 bits for the embeddings' states); "sgd" (momentum 0.9);
                   "adafactor" (no momentum); "lion"; "lion8bit"; "paged_adamw8bit" (8-bit states
                   that the driver moves between GPU and host); "adamw_stochastic" (bf16 states;
                   weights and states rounded stochastically; with base="bf16" and no adapters)
    checkpointing  recompute each layer's activations in the backward pass
    frozen         None trains everything; k freezes the embeddings and the first k layers
                   (0 freezes the embeddings alone)
    lora_rank      None trains the weights; r freezes them, and trains the head and adapters of
                   rank r in the layers that `frozen` does not freeze
    lora_targets   what gets adapters: "query-value" projections, or "all-linear" layers
    lora_alpha     α of LoRA; None takes 2 r
    lora_scale     of an adapter's product: "alpha/r", or "alpha/sqrt(r)" (rsLoRA)
    base           dtype in which weights are stored: "fp32"; "bf16", with adapters all but those
                   and a new head; "nf4" (with adapters): linear layers in 4 bits, the rest in 16
    attention      "eager", "sdpa" (fused); None takes the best that the model has
    loss           of language models: "full", or "chunked" (never all logits at once)
    float8         None, or how the linear layers' products in 8 bits are scaled: "tensorwise" or
                   "rowwise" (`techniques.eight_bits`); not with adapters, frozen layers or fp16
    compile        run the model through torch.compile; a plan is that of the step without
    offload        "optimizer": its states and its update on the host; "activations": what is saved
                   for the backward pass waits there; None keeps all on the GPU
    optimizer_in_backward  update each parameter as soon as its gradient is there, and free it
    steps          optimizer steps
    learning_rate  peak learning rate; None takes the model's own, which suits AdamW on all weights
    weight_decay   on every parameter that trains; decoupled from the gradient, except with "sgd"
    warmup         fraction of the steps in which the learning rate rises linearly from 0; after
                   them it falls linearly to 0
    max_grad_norm  gradients are clipped to this L2 norm; None clips nothing
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
    lora_targets: str = "query-value"
    lora_alpha: float | None = None
    lora_scale: str = "alpha/r"
    base: str = "fp32"
    attention: str | None = None
    loss: str = "full"
    float8: str | None = None
    compile: bool = False
    offload: str | None = None
    optimizer_in_backward: bool = False
    steps: int = 60
    learning_rate: float | None = None
    weight_decay: float = 0.01
    warmup: float = 0.1
    max_grad_norm: float | None = 1.0
    seed: int = 0

    def __post_init__(self):
        make_plain(self)
        check_recipe(self)
        check_techniques_of(self)

    @property
    def task(self) -> str:
        """What the model learns: a class of each "text" or "image", or "chat", an answer."""
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
        """Maximum length of an example in tokens, None for images."""
        return (self.length or LENGTH[self.profile]) if self.task != "image" else None

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
        """The recipe of `to_dict`. Raises ValueError or TypeError for what is none."""
        if not isinstance(values, dict):
            raise TypeError(f"A recipe is an object of names and values, not {shown(values)}.")
        unknown = sorted({str(name) for name in values} - {field.name for field in fields(cls)})
        if unknown:
            near = difflib.get_close_matches(unknown[0], [one.name for one in fields(cls)], 1)
            question = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"A recipe has no field {clipped(', '.join(unknown))}.{question}")
        return cls(**values)


def difference(before: Recipe, after: Recipe) -> dict[str, tuple[Any, Any]]:
    """{field: (value before, value after)} for every field in which the two recipes differ.

    Raises TypeError for what is no recipe.
    """
    of_type("before", before, Recipe)
    of_type("after", after, Recipe)
    values = {
        field.name: (getattr(before, field.name), getattr(after, field.name))
        for field in fields(Recipe)
    }
    return {name: (old, new) for name, (old, new) in values.items() if old != new}
