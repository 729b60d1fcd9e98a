"""A fine-tune's whole state in one file: weights, optimizer states, random number generators, losses.

Safetensors, no pickle: tensors as they are, the rest as JSON in the header. Written beside the old file and then
renamed over it, so a kill at any moment leaves the old state or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from helpers.recipe import Recipe, difference

FILE = "state.safetensors"


def save(
    folder: str | Path,
    recipe: Recipe,
    step: int,
    model,
    optimizer,
    losses: list[float],
    scaler=None,
    skipped: Sequence[int] = (),
) -> Path:
    """Write the state after `step` optimizer steps to `folder`/state.safetensors, atomically.

    skipped  the steps that changed nothing because a gradient overflowed in fp16
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": value.detach().cpu().contiguous().clone()
        for name, value in model.state_dict().items()
    }
    numbers = {}
    for (name, _), state in zip(_trained(model), _states(model, optimizer)):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{key}.{name}"] = value.detach().cpu().contiguous().clone()
            else:  # bitsandbytes counts its steps in a plain number
                numbers[f"{key}.{name}"] = value
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    note = {
        "recipe": recipe.to_dict(),
        "step": step,
        "losses": losses,
        "skipped": list(skipped),
        "numbers": numbers,
        "scaler": scaler.state_dict() if scaler is not None else {},
    }
    unfinished = folder / f"{FILE}.{os.getpid()}.unfinished"
    try:
        save_file(tensors, unfinished, metadata={"fine_tune": json.dumps(note)})
        os.replace(unfinished, folder / FILE)
    finally:
        unfinished.unlink(missing_ok=True)
    return folder / FILE


def load(
    folder: str | Path, recipe: Recipe, model, optimizer, scaler=None
) -> tuple[int, list[float], list[int]]:
    """Put a saved state into model, optimizer, scaler and generators; returns (steps done, their losses, which of them
    were skipped).

    (0, [], []) where nothing was saved yet. Raises ValueError when the file belongs to another recipe or cannot be read.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return 0, [], []
    try:
        with safe_open(path, "pt") as file:
            note = json.loads(file.metadata()["fine_tune"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{FILE} in {Path(folder).name} is not a saved fine-tune or is damaged: "
            "delete it and start again."
        ) from error
    other = difference(Recipe.from_dict(note["recipe"]), recipe)
    if other:
        changes = ", ".join(
            f"{name}={old!r} there, {new!r} now" for name, (old, new) in other.items()
        )
        raise ValueError(
            f"{FILE} in {Path(folder).name} was saved by another recipe ({changes}): "
            "use another folder, or delete it."
        )
    model.load_state_dict(
        {name[6:]: value for name, value in tensors.items() if name.startswith("model.")}
    )
    for name, parameter in _trained(model):
        keys = [
            key for key in tensors if key.startswith("optimizer.") and key.split(".", 2)[2] == name
        ]
        optimizer.state[parameter] = {
            key.split(".", 2)[1]: tensors[key].to(parameter.device) for key in keys
        }
        optimizer.state[parameter] |= {
            key.split(".", 1)[0]: value
            for key, value in note["numbers"].items()
            if key.split(".", 1)[1] == name
        }
    if scaler is not None and note["scaler"]:
        scaler.load_state_dict(note["scaler"])
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return note["step"], note["losses"], note["skipped"]


def _trained(model):
    return [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]


def _states(model, optimizer):
    return [optimizer.state.get(parameter, {}) for _, parameter in _trained(model)]
