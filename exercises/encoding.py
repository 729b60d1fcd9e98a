"""Answers as JSON and back: plain values, tensors, arrays, recipes, and references to functions.

An answer leaves a student's process in this form and no other, so that what is checked is a plain
value: no pickle is read, no class of the student's is made, no method of theirs is called. What has
no such form arrives as `Unreadable`, which is right for no exercise. `decode` takes data that
anybody may have written.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import math
import sys
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from dataclasses import fields
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

DEEPEST = 40  # levels of lists in lists
MOST_ITEMS = 10**5  # of a generator
RECORDS = {"Recipe": "helpers.recipe", "Layout": "tight_fit.layouts.layout"}
DTYPES = {  # of torch: bytes of an element
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "complex64": 8,
    "complex128": 16,
}
# What the libraries raise for data that no `encode` has written, such as a dtype "(1,".
NOT_SENT = (KeyError, TypeError, AttributeError, OverflowError, ImportError, SyntaxError)
NOT_SENT += (RuntimeError, MemoryError)
SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


class Unreadable:
    """Stands for an answer of a type that no exercise asks for. Shows the type's name."""

    def __init__(self, kind: str):
        self.kind = kind

    def __repr__(self) -> str:
        return f"an object of the type {self.kind}"


def encode(value: Any, functions: list[Callable], depth: int = 0) -> Any:
    """What `json.dumps` takes. A function is appended to `functions`, and its place stands for it.

    Subclasses become what they derive from: a bool, int, float, str, list, tuple, dict or set.
    Other numbers, such as fractions, become floats.
    """
    if depth > DEEPEST:
        return {"kind": "other", "type": "something nested too deeply"}
    try:
        return _encoded(value, functions, depth + 1)
    except Exception:  # an object of the student's may raise anything
        return {"kind": "other", "type": type(value).__name__}


def _encoded(value: Any, functions: list[Callable], depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if value is ...:
        return {"kind": "ellipsis"}
    if isinstance(value, str):  # NumPy's own texts as well
        return str.__str__(value)
    if isinstance(value, np.generic):
        return {"kind": "scalar", **_array(np.asarray(value))}
    if isinstance(value, np.ndarray):
        return {"kind": "array", **_array(value)}
    if is_tensor(value):
        return {"kind": "tensor", **_tensor(value)}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"kind": "complex", "parts": [value.real, value.imag]}
    if isinstance(value, list):
        return [encode(item, functions, depth) for item in value]
    for kind, type_ in SEQUENCES.items():
        if isinstance(value, type_):
            return {"kind": kind, "items": [encode(item, functions, depth) for item in value]}
    if isinstance(value, (range, Iterator, KeysView, ValuesView, ItemsView)):
        items = list(itertools.islice(value, MOST_ITEMS))
        return {"kind": "iterator", "items": [encode(item, functions, depth) for item in items]}
    if isinstance(value, dict):
        pairs = [
            [encode(key, functions, depth), encode(item, functions, depth)]
            for key, item in value.items()
        ]
        return {"kind": "dict", "items": pairs}
    if type(value).__name__ in RECORDS and type(value).__module__ == RECORDS[type(value).__name__]:
        given = {
            field.name: encode(getattr(value, field.name), functions, depth)
            for field in fields(value)
        }
        return {"kind": "record", "type": type(value).__name__, "fields": given}
    if callable(value):
        functions.append(value)
        return {"kind": "function", "place": len(functions) - 1}
    if isinstance(value, (Real, Decimal)):  # `check` takes them in a notebook
        return float(value)
    return {"kind": "other", "type": type(value).__name__}


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch, which is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array(value: np.ndarray) -> dict[str, Any]:
    if value.dtype.kind not in "biufc":
        raise TypeError("an array of objects")
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    import torch  # a notebook of numbers alone does without

    flat = value.detach().cpu().contiguous().reshape(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "data": data}


def decode(data: Any, function: Callable[[int], Any], depth: int = 0) -> Any:
    """The value that `encode` was given. `function(place)` makes what stands for a function.

    Raises ValueError for what `encode` does not write.
    """
    if depth > 2 * DEEPEST:
        raise ValueError("The answer is nested too deeply.")
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [decode(item, function, depth + 1) for item in data]
    try:
        return _decoded(data, function, depth + 1)
    except NOT_SENT as error:
        raise ValueError("The answer is not in the form in which answers are sent.") from error


def _decoded(data: dict[str, Any], function: Callable[[int], Any], depth: int) -> Any:
    kind = data["kind"]
    if kind == "ellipsis":
        return ...
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(item, function, depth) for item in data["items"])
    if kind == "iterator":
        return iter([decode(item, function, depth) for item in data["items"]])
    if kind == "dict":
        return {
            decode(key, function, depth): decode(it, function, depth) for key, it in data["items"]
        }
    if kind == "complex":
        return complex(*map(float, data["parts"]))
    if kind in ("scalar", "array"):
        dtype = np.dtype(str(data["dtype"]))
        if dtype.kind not in "biufc":
            raise ValueError("An array of objects is no answer.")
        array = np.frombuffer(_bytes(data, dtype.itemsize), dtype).reshape(data["shape"]).copy()
        return array if kind == "array" else array[()]
    if kind == "tensor":
        import torch

        content = _bytes(data, DTYPES[data["dtype"]])
        dtype = getattr(torch, data["dtype"])
        if not content:
            return torch.empty(data["shape"], dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).reshape(data["shape"])
    if kind == "record":
        record = getattr(importlib.import_module(RECORDS[data["type"]]), data["type"])
        given = {name: decode(value, function, depth) for name, value in data["fields"].items()}
        return record(**given)
    if kind == "function":
        return function(int(data["place"]))
    return Unreadable(str(data["type"])[:80])


def _bytes(data: dict[str, Any], itemsize: int) -> bytes:
    """The bytes of a tensor or array, as many as its shape says."""
    shape = data["shape"]
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError("A shape holds whole numbers from 0.")
    content = base64.b64decode(data["data"], validate=True)
    if len(content) != math.prod(shape) * itemsize:
        raise ValueError("A tensor has not the bytes that its shape needs.")
    return content
