"""A fine-tune's whole state in one file: weights, optimizer states, random generators, losses.

A state knows what it belongs to: recipe, optimizer and its settings, training data, kind of device.
`load` gives it back to exactly that, and refuses everything else in one sentence. How the file is
written, and how damage is found: helpers/storage/state_file.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from helpers.data import Encoded
from helpers.recipe import Recipe
from helpers.storage import belongs, model_state, optimizer_state, state_file
from helpers.storage.state_file import FILE, State

__all__ = ["FILE", "Diverged", "advice", "fingerprint", "load", "save"]


class Diverged(ArithmeticError):
    """The loss, or a weight or optimizer state, has become infinite or NaN."""


def fingerprint(train: Encoded) -> str:
    """A digest of training data: every token, pixel and label, and how batches are made of them.

    Raises TypeError for data of your own, of which nobody knows what it holds.
    """
    belongs.check_data(train)
    return state_file.digest(repr((train.pixels, train.trim)), train.columns | {"": train.lengths})


def save(
    folder: str | Path,
    recipe: Recipe,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    scaler: torch.amp.GradScaler | None = None,
    skipped: Sequence[int] = (),
    data: str = "",
) -> Path:
    """Write the state after `step` optimizer steps to `folder`/state.safetensors, atomically.

    skipped  the steps that changed nothing because a gradient overflowed in fp16
    data     the `fingerprint` of the training data
    Raises Diverged where a weight or state is not finite, ValueError where the folder has the state
    of another run, OSError where the disk is full or read-only. What was there is kept each time.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    states, numbers = optimizer_state.gathered(optimizer, _trained(model))
    tensors = {name: _copy(value) for name, value in (tensors | states).items()}
    for name, value in tensors.items():
        if value.is_floating_point() and value.numel() and not _finite(value):
            raise Diverged(f"{name} is not finite after step {step}: {advice(folder)}.")
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    mine = belongs.describe(recipe, model, optimizer, data)
    note = {
        "belongs": mine,
        "step": step,
        "losses": losses,
        "skipped": list(skipped),
        "numbers": numbers,
        "groups": optimizer_state.groups(optimizer),
        "scaler": scaler.state_dict() if scaler is not None else {},
    }
    there = (state_file.peek(Path(folder)) or {}).get("belongs", {})
    if there.keys() == mine.keys():
        belongs.refuse_another(there, mine, Path(folder))
    return state_file.write(Path(folder), State(note, tensors))


def load(
    folder: str | Path,
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    data: str = "",
) -> tuple[int, list[float], list[int]]:
    """Put a saved state into model, optimizer, scaler and generators.

    Returns (optimizer steps done, their losses, the steps that were skipped); (0, [], []) where
    nothing was saved yet. Raises ValueError, before anything is changed, for a state of another
    recipe, optimizer, data set or kind of device, and for one that is damaged or incomplete.
    """
    mine = belongs.describe(recipe, model, optimizer, data)
    state = state_file.read(Path(folder))
    if state is None:
        return 0, [], []
    note, tensors = state
    belongs.check_note(note, tensors, Path(folder))
    belongs.refuse_another(note["belongs"], mine, Path(folder))
    trained = _trained(model)
    wrong = model_state.different(model, tensors)
    wrong += optimizer_state.strange(tensors, note["numbers"], trained)
    wrong += optimizer_state.missing(optimizer, tensors, note["numbers"], trained)
    if wrong or len(note["losses"]) != note["step"] or not 0 < note["step"] <= recipe.steps:
        raise ValueError(
            f"The state in {folder} is not one of this model "
            f"({', '.join(wrong[:3]) or 'the number of its steps'} differs): another version of "
            "the course saved it, or it is damaged; delete it and start again."
        )
    model_state.put(model, tensors)
    optimizer_state.put(optimizer, trained, tensors, note)
    if scaler is not None and note["scaler"]:
        scaler.load_state_dict(note["scaler"])
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return note["step"], note["losses"], note["skipped"]


def advice(folder: str | Path | None) -> str:
    """What to do after a run has diverged, and what its folder has, as the end of a sentence."""
    step = state_file.step_in(Path(folder)) if folder is not None else 0
    kept = (
        f"the state of step {step} in {folder}, kept and finite, leads here again" if step else ""
    )
    again = f", and start anew in another folder, as {kept}" if kept else ""
    return f"lower learning_rate, lengthen warmup, or use precision='fp32'{again}"


def _finite(value: torch.Tensor) -> bool:
    least, most = value.aminmax()  # NaN where any is
    return math.isfinite(least) and math.isfinite(most)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
