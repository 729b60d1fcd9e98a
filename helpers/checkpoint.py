"""A fine-tune's whole state in one file: weights, optimizer states, random generators, losses.

Safetensors, no pickle: tensors as they are, the rest as JSON in the header. The file is written
beside the old one and then renamed over it, so that a kill at any moment leaves the old state or
the new one, never half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from helpers.recipe import Recipe, difference

FILE = "state.safetensors"


def save(
    folder: str | Path,
    recipe: Recipe,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    scaler: torch.amp.GradScaler | None = None,
    skipped: Sequence[int] = (),
) -> Path:
    """Write the state after `step` optimizer steps to `folder`/state.safetensors, atomically.

    skipped  the steps that changed nothing because a gradient overflowed in fp16
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": _copy(value) for name, value in model.state_dict().items()}
    numbers = {}
    for name, parameter in _trained(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{key}.{name}"] = _copy(value)
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
    folder: str | Path,
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
) -> tuple[int, list[float], list[int]]:
    """Put a saved state into model, optimizer, scaler and generators.

    Returns (optimizer steps done, their losses, the steps that were skipped); (0, [], []) where
    nothing was saved yet. Raises ValueError for a file of another recipe or one that cannot be
    read.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return 0, [], []
    note, tensors = _read(path)
    changed = difference(Recipe.from_dict(note["recipe"]), recipe)
    if changed:
        changes = ", ".join(f"{name}={a!r} there, {b!r} now" for name, (a, b) in changed.items())
        raise ValueError(
            f"{FILE} in {path.parent.name} was saved by another recipe ({changes}): "
            "use another folder, or delete it."
        )
    # Names begin with what they belong to: "model.NAME", or "optimizer.KEY.NAME" of a parameter.
    parts = [name.split(".", 1) for name in tensors]
    model.load_state_dict(
        {name: tensors[f"model.{name}"] for kind, name in parts if kind == "model"}
    )
    states: dict[str, dict[str, Any]] = {}
    for kind, rest in parts:
        if kind == "optimizer":
            key, name = rest.split(".", 1)
            states.setdefault(name, {})[key] = tensors[f"optimizer.{rest}"]
    for name, parameter in _trained(model):
        state = states.get(name, {})
        optimizer.state[parameter] = {key: t.to(parameter.device) for key, t in state.items()}
    for rest, value in note["numbers"].items():
        key, name = rest.split(".", 1)
        optimizer.state[model.get_parameter(name)][key] = value
    if scaler is not None and note["scaler"]:
        scaler.load_state_dict(note["scaler"])
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return note["step"], note["losses"], note["skipped"]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What was noted, and the tensors by name. Raises ValueError for a file that is not whole."""
    try:
        with safe_open(path, "pt") as file:
            note = json.loads(file.metadata()["fine_tune"])
            return note, {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{FILE} in {path.parent.name} is not a saved fine-tune or is damaged: "
            "delete it and start again."
        ) from error


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)
