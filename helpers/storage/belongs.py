"""What a saved state belongs to: recipe, optimizer and its settings, training data, device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.recipe import Recipe, difference
from helpers.storage import optimizer_state
from tight_fit.checks import shown


def describe(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, data: str
) -> dict[str, Any]:
    """What a run's state belongs to, as JSON gives it back.

    The learning rate is left out: it follows from recipe and step.

    data  the fingerprint of the training data
    """
    described = {
        "recipe": recipe.to_dict(),
        "optimizer": type(optimizer).__qualname__,
        "settings": optimizer_state.settings(optimizer),
        "data": data,
        "device": next(model.parameters()).device.type,
    }
    return json.loads(json.dumps(described))


def check_data(train: Any) -> None:
    """Raises TypeError for training data of which no digest can be made."""
    if not all(hasattr(train, name) for name in ("pixels", "trim", "columns", "lengths")):
        raise TypeError(
            f"A checkpoint must know its training data, and train={shown(train)} is not of type "
            "Encoded: give one, or leave checkpoint out."
        )


def check_note(note: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Raises ValueError, in one sentence, for a note that is none of a fine-tune of this version.

    Such a state is whole, and another program has written it.
    """
    kinds = {"belongs": dict, "step": int, "losses": list, "skipped": list}
    kinds |= {"numbers": dict, "scaler": dict}
    named = {"recipe", "optimizer", "settings", "data", "device"}
    wrong = [
        name
        for name, kind in kinds.items()
        if not isinstance(note, dict) or not isinstance(note.get(name), kind)
    ]
    if not wrong:
        numbers = [*note["losses"], *note["skipped"], note["step"]]
        plain = all(type(number) in (int, float) and isfinite(number) for number in numbers)
        wrong += [] if plain else ["losses"]
        wrong += [] if named <= note["belongs"].keys() else ["belongs"]
    random, now = tensors.get("random.cpu"), torch.get_rng_state()
    if random is None or (random.shape, random.dtype) != (now.shape, now.dtype):
        wrong.append("random.cpu")
    if wrong:
        raise ValueError(
            f"The state in {folder} is not one of this version of the course ({wrong[0]} is "
            "missing or of another kind): use the version that saved it, or another folder."
        )


def refuse_another(there: dict[str, Any], mine: dict[str, Any], folder: Path) -> None:
    """Raises ValueError, in one sentence, where a folder's state belongs to another run."""
    try:
        changed = difference(Recipe.from_dict(there["recipe"]), Recipe.from_dict(mine["recipe"]))
        unknown = ""
    except (ValueError, TypeError) as error:
        changed, unknown = {}, f"by another version of the course ({str(error).rstrip('.')})"
    if unknown:
        what = unknown
    elif changed:
        changes = ", ".join(f"{name}={a!r} there, {b!r} now" for name, (a, b) in changed.items())
        what = f"by another recipe ({changes})"
    elif there["optimizer"] != mine["optimizer"]:
        what = f"with another optimizer ({there['optimizer']} there, {mine['optimizer']} now)"
    elif there["settings"] != mine["settings"]:
        what = f"with other settings of {mine['optimizer']}"
    elif there["data"] != mine["data"]:
        what = "on other training data"
    elif there["device"] != mine["device"]:
        what = f"on another device ({there['device']} there, {mine['device']} now)"
    else:
        return
    raise ValueError(f"The state in {folder} was saved {what}: use another folder, or delete it.")
