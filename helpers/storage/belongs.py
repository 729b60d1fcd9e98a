"""What a saved state belongs to: recipe, optimizer and its settings, training data, device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.recipe import Recipe, difference


def describe(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, data: str
) -> dict[str, Any]:
    """What a run's state belongs to, as JSON gives it back.

    The learning rate is left out: it follows from recipe and step.

    data  the fingerprint of the training data
    """
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "lr")}
        | {"parameters": len(group["params"])}
        for group in optimizer.param_groups
    ]
    described = {
        "recipe": recipe.to_dict(),
        "optimizer": type(optimizer).__qualname__,
        "settings": settings,
        "data": data,
        "device": next(model.parameters()).device.type,
    }
    return json.loads(json.dumps(described, default=lambda value: type(value).__name__))


def refuse_another(there: dict[str, Any], mine: dict[str, Any], folder: Path) -> None:
    """Raises ValueError, in one sentence, where a folder's state belongs to another run."""
    changed = difference(Recipe.from_dict(there["recipe"]), Recipe.from_dict(mine["recipe"]))
    if changed:
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
