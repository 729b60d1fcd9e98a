"""What was asked of the command: a model, a step of it and a GPU, and the key of its answer.

Nothing here imports PyTorch or transformers, so that a kept answer is found at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tight_fit import gpus
from tight_fit.checks import whole
from tight_fit.gpus import GPU
from tight_fit.models import bounds
from tight_fit.models import names as model_names

# The options that set the field of the same name of `models.step.ModelStep`.
STEP = (
    "batch_size length side precision optimizer checkpointing accumulation lora_rank frozen task "
    "reference completion classes weights base kbit lora_targets lora_alpha lora_scale attention "
    "loss compile offload float8 optimizer_in_backward"
).split()
AT_LEAST = {"batch_size": 1, "length": 1, "accumulation": 1}
BATCH = 16  # examples per optimizer step where nothing is said
USUAL = {"optimizer": "adamw", "accumulation": 1}  # what changes nothing where it is said
# Libraries that a plan depends on.
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "numpy")
# The parts of this package that make plans: what plans one GPU, and no command.
CODE = ("gpus", "kernels", "memory", "models", "plans", "search", "techniques", "trace", "*.py")
DATA = ("gpus/table.csv", "kernels/constants.json")  # that their plans are made with


@dataclass(frozen=True)
class Question:
    """One question, complete.

    model   as it was typed
    name    on the hub, or a path
    values  what its config.json says
    fields  those of the step that were given, {field of ModelStep: value}
    gpu     None asks for every GPU that holds the step
    others  names of the other GPUs that the one asked for may mean
    quick   only whether it fits, without what would
    """

    model: str
    name: str
    values: dict[str, Any]
    fields: dict[str, Any]
    gpu: GPU | None = None
    others: tuple[str, ...] = ()
    quick: bool = False

    @property
    def plain(self) -> dict[str, Any]:
        """What the answer depends on, beside versions, as JSON holds it."""
        given = {"batch_size": BATCH, **self.fields}
        return {
            "values": self.values,
            "fields": {
                name: given[name] for name in sorted(given) if given[name] != USUAL.get(name)
            },
            "gpu": list(self.gpu) if self.gpu else None,
        }

    def assumed(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What was not said and decides the answer, from its facts: {field: value}."""
        return {
            name: facts[name]
            for name in ("batch_size", "length", "task", "weights", "precision", "optimizer")
            if name not in self.fields and facts[name] is not None
        }

    @property
    def key(self) -> str:
        """The same in 40 hexadecimal digits."""
        return digest(self.plain)


def of(asked: argparse.Namespace) -> Question:
    """The question that the options of `command.parser` ask.

    Raises FileNotFoundError, ValueError and hub.HubUnavailable for a model or GPU not to be had.
    """
    found = gpus.matches(asked.gpu) if asked.gpu else []
    gpu = gpus.find(asked.gpu) if asked.gpu else None
    fields = {
        name: value
        for name in STEP
        if (value := getattr(asked, name, None)) is not None and value is not False
    }
    if fields.get("optimizer_in_backward"):
        fields["max_grad_norm"] = None  # no gradient is left whose norm could be taken with others'
    model = asked.model or asked.name
    for name, least in AT_LEAST.items():
        if name in fields:
            whole(name, fields[name], least)
    values = model_names.values_of(model)
    _check(values, fields.get("length"), str(model))
    return Question(
        model=model,
        name=model_names.full_name(model),
        values=values,
        fields=fields,
        gpu=gpu,
        others=tuple(other.name for other in found[1:]),
        quick=bool(asked.quick),
    )


def _check(values: dict[str, Any], length: int | None, model: str) -> None:
    """Refuse what is refused later as well, before PyTorch is imported. Raises ValueError."""
    try:
        bounds.check_values(values)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from None
    text = values.get("text_config") or values
    most = text.get("max_position_embeddings") if isinstance(text, dict) else None
    if length is not None and isinstance(most, int) and 0 < most < length:
        raise ValueError(f"length={length} is longer than the {most} tokens this model takes.")


def digest(value: object) -> str:
    """40 hexadecimal digits that tell values of JSON apart."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@cache
def versions() -> dict[str, str]:
    """{library: version} of what a plan is made with; "none" for one that is not installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


@cache
def code() -> str:
    """40 hexadecimal digits that change with the code that makes plans."""
    here = Path(__file__).parents[1]
    files = {
        file
        for part in CODE
        for file in (here.glob(part) if "*" in part else (here / part).rglob("*.py"))
    }
    sums = {
        str(file.relative_to(here)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files | {here / data for data in DATA})
    }
    return digest(sums)
