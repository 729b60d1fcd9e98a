"""What answers read of a configuration, as data, so that they need not import transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tight_fit.models.bounds import SIZES

LABELS = ("id2label", "label2id")  # of thousands of classes, which nothing here reads
COMPUTED = (*SIZES, "num_labels")  # asked for by name as well: properties, and other names


class Kind(NamedTuple):
    """A class of transformers: its name, and whether it has PyTorch's fused attention."""

    name: str
    sdpa: bool


class Part:
    """The fields of a configuration, or of a part of it, as attributes."""

    def __init__(self, fields: Mapping[str, Any]):
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"The configuration has no {name}.")


class Remembered(Part):
    """A configuration's fields, its parts, and the classes that transformers has for it.

    facts   all of them, as JSON holds them
    values  of its config.json, which it is read from again where a model is made; and
    name    its name in errors
    """

    def __init__(
        self, facts: Mapping[str, Any], values: dict[str, Any] | None = None, name: str = ""
    ):
        super().__init__(facts["fields"])
        self.facts, self.values, self.name = dict(facts), values or {}, name
        self.kinds = {task: Kind(*kind) for task, kind in facts["kinds"].items()}
        self._text = Part(facts["text"]) if facts["text"] else self
        if facts["vision"]:
            self.vision_config = Part(facts["vision"])

    @classmethod
    def of(cls, config: Any, parts: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Remembered:
        """Those of transformers' configuration.

        parts  "text" and "vision", its parts that read text and images; None where there is none
        kinds  {task: transformers' class for it}
        """
        inside = {
            name: None if part is None or part is config else _fields(part)
            for name, part in parts.items()
        }
        return cls({"fields": _fields(config), "kinds": dict(kinds), **inside})

    def get_text_config(self, decoder: bool = False) -> Part:
        """The part that reads text."""
        return self._text

    def to_dict(self) -> dict[str, Any]:
        """The values of its config.json."""
        return self.values


def _fields(config: Any) -> dict[str, Any]:
    """What a configuration's fields are, those that JSON can hold; dtypes as text."""
    names = {*vars(config), *(getattr(config, "attribute_map", None) or {}), *COMPUTED}
    found = {}
    for name in sorted(names - set(LABELS)):
        try:
            value = getattr(config, name)
            if name == "dtype" and value is not None:
                value = str(value)
            found[name] = json.loads(json.dumps(value))
        except Exception:  # it has none, or one that is no JSON: a part of it, a method
            continue
    return {name: value for name, value in found.items() if not name.startswith("_")}
