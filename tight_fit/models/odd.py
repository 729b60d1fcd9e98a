"""Which fields of a configuration are likely to be why a library ends in an error of its own.

Nothing is refused here: a field is named beside an error that names none.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from tight_fit.checks import shown

MOST = 10_000_000  # above every size that published configurations have, but for positions
NAMED = 3  # fields that are named


def hint(kind: str, values: dict[str, Any]) -> str:
    """What differs in kind from the defaults of a model type: " (look at ... in its config.json)".

    Empty where nothing does.
    """
    try:
        usual: Any = CONFIG_MAPPING[kind]().to_dict()
    except Exception:  # a type that has no defaults
        return ""
    found = [
        f"{name}={shown(value)}"
        for name, value in values.items()
        if name in usual and _is_odd(name, value, usual[name])
    ]
    named = ", ".join(found[:NAMED])
    return f" (look at {named} in its config.json)" if found else ""


def _is_odd(name: str, value: Any, usual: Any) -> bool:
    if name in ("dtype", "torch_dtype"):
        known = isinstance(getattr(torch, str(value).removeprefix("torch."), None), torch.dtype)
        return value is not None and not known
    if name.endswith("token_id"):
        return False
    if isinstance(usual, str) and usual in ACT2FN:
        return value not in list(ACT2FN)
    if "drop" in name or name.endswith("_prob"):
        return not (_is_number(value) and 0 <= value <= 1) and value != usual
    if isinstance(usual, bool) or usual is None:
        return usual is None and _is_number(value) and not 0 < value <= MOST
    if isinstance(usual, (int, float)):
        if not _is_number(value) or isinstance(value, float) > isinstance(usual, float):
            return value != usual
        return value < 0 <= usual or value == 0 < usual or value > max(usual, MOST)
    return type(value) is not type(usual) or (not value and bool(usual))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
