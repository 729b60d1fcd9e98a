"""Which steps of a model the calculator knows, and the streams of them.

One trace per choice of weights, precision, checkpointing and what trains; one more per other
optimizer, whose states and update are put in the place of AdamW's. Each is a step of two
micro-batches, from which that of one is read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from tight_fit.command.answer import quietly
from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import trace_model_step
from tight_fit.trace.storage_trace import StorageTrace
from tools.calculator.sizes import UNIT, Shape, Size, primes_for, size_of
from tools.calculator.stream import StepStream, read, write

# {name: fields}: dtype of the weights and autocast. fp16 autocast takes what bf16 takes, and TF32
# what fp32 takes.
NUMBERS = {
    "fp32": {"weights": "fp32", "precision": "fp32"},
    "mixed": {"weights": "fp32", "precision": "bf16"},
    "bf16": {"weights": "bf16", "precision": "bf16"},
}
TRAINED = ("all", "lora", "half")  # half: the embeddings and half of the layers are frozen
OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "adafactor")


@dataclass
class Family:
    """One choice of a model's step, before it is traced.

    key     "numbers/checkpointing/trained", such as "mixed/1/lora"
    fields  of `ModelStep`
    """

    key: str
    fields: dict[str, Any]

    def step(self, config: PretrainedConfig, shape: Shape, **more: Any) -> ModelStep:
        """A step of two micro-batches at a shape."""
        fields = self.fields | more
        if "lora" in self.key:
            fields["lora_rank"] = shape.rank
        if shape.units > 1:
            fields["length"] = shape.units * UNIT
        return ModelStep(config, batch_size=2 * shape.examples, accumulation=2, **fields)


class ModelStreams:
    """All streams of one model.

    sizes  the distinct sizes of its storages, which streams name by their number
    """

    def __init__(self, config: PretrainedConfig):
        self.config = config
        self.sizes: list[Size] = []
        self._numbers: dict[Size, int] = {}
        self._constant: set[int] = set()  # sizes that are the same at two shapes of primes
        plain = ModelStep(config, weights="fp32")
        self.reads, self.layers = plain.reads, _layers(config)
        self.first, self.second = self._shapes()
        self.parameters = 0

    def _shapes(self) -> tuple[Shape, Shape]:
        facts = self.config.to_dict().items()
        constants = [
            value for name, value in facts if isinstance(value, int) and not name.endswith("_id")
        ]
        first, second = primes_for(constants)
        if self.reads in ("image", "pair"):  # of a fixed number of patches and tokens
            return first._replace(units=1), second._replace(units=1)
        return first, second

    def families(self) -> Iterator[Family]:
        """The choices that this model may take."""
        stored = hf_config.weights_of(self.config)
        for numbers, fields in NUMBERS.items():
            if stored == "bf16" and numbers == "fp32":
                continue
            for checkpointing in (False, True):
                for trained in TRAINED:
                    more: dict[str, Any] = {"checkpointing": checkpointing}
                    if trained == "half":
                        if not self.layers or numbers == "bf16":
                            continue
                        more["frozen"] = self.layers // 2
                    yield Family(f"{numbers}/{checkpointing:d}/{trained}", fields | more)

    def streams(self, say: Callable[[str], object]) -> dict[str, dict[str, list[str]]]:
        """{key of a family: {section: words}}, and {key of an optimizer: its two sections}.

        Choices that the model refuses are left out. Raises ValueError where a size is no product.
        """
        found: dict[str, dict[str, list[str]]] = {}
        checked: set[str] = set()
        for family in self.families():
            trained = family.key.rsplit("/", 1)[1]
            say(family.key)
            try:
                stream = self._stream(family, self.first, check=trained not in checked)
            except hf_config.CannotPlan:
                continue
            checked.add(trained)
            found[family.key] = dict(vars(stream))
            weights = family.fields["weights"]
            if family.fields["checkpointing"] or f"{weights}/{trained}/sgd" in found:
                continue
            for optimizer in OPTIMIZERS[1:]:
                other = self._stream(family, self.first, optimizer=optimizer)
                found[f"{weights}/{trained}/{optimizer}"] = {
                    "states": other.states,
                    "update": other.update,
                }
        return found

    def _stream(self, family: Family, shape: Shape, check: bool = False, **more: Any) -> StepStream:
        if "lora" not in family.key:
            shape = shape._replace(rank=1)
        trace = self._trace(family.step(self.config, shape, **more))
        traced, other = None, self.second if "lora" in family.key else self.second._replace(rank=1)
        if check:
            traced = self._trace(family.step(self.config, other))
            self._constant |= {a for a, b in zip(trace.bytes, traced.bytes) if a == b}
        stream = write(trace, lambda count: self._number(self._size(count, shape)))
        if traced is not None:
            self._check(family, stream, other, traced)
        return stream

    def _size(self, count: int, shape: Shape) -> Size:
        return Size(count, 0, 0, 0) if count in self._constant else size_of(count, shape)

    def _check(
        self, family: Family, stream: StepStream, shape: Shape, traced: StorageTrace
    ) -> None:
        """Raises ValueError where the step at another shape is not what the stream says."""
        words = [word for section in vars(stream).values() for word in section]
        told = read(words, self.sizes, shape)
        if told.events != traced.events or told.bytes != traced.bytes:
            raise ValueError(f"{family.key}: the sizes of this step are no products.")

    def _number(self, size: Size) -> int:
        if size not in self._numbers:
            self._numbers[size] = len(self.sizes)
            self.sizes.append(size)
        return self._numbers[size]

    def _trace(self, step: ModelStep) -> StorageTrace:
        with quietly():
            trace, self.parameters = trace_model_step(step, "cuda")
        return trace


def _layers(config: PretrainedConfig) -> int:
    """Layers of a model with one stack of them; 0 for others, none of which may be frozen."""
    if getattr(config, "is_encoder_decoder", False):
        return 0
    return getattr(hf_config.text_config(config), "num_hidden_layers", 0) or 0
