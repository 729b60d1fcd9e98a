"""A fine-tune's whole state in one file: weights, optimizer states, random generators, losses.

A state knows what it belongs to: recipe, optimizer and its settings, training data, kind of device.
`load` gives it back to exactly that, and refuses everything else in one sentence. How the file is
written, and how damage is found: helpers/storage/state_file.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.data import Encoded
from helpers.recipe import Recipe
from helpers.storage import belongs, optimizer_state, state_file
from helpers.storage.state_file import FILE, State
from helpers.values import shown

__all__ = ["FILE", "Diverged", "advice", "fingerprint", "load", "save"]


class Diverged(ArithmeticError):
    """The loss, or a weight or optimizer state, has become infinite or NaN."""


def fingerprint(train: Encoded) -> str:
    """A digest of training data: every token, pixel and label, and how batches are made of them.

    Raises TypeError for data of your own, of which nobody knows what it holds.
    """
    if not all(hasattr(train, name) for name in ("pixels", "trim", "columns", "lengths")):
        raise TypeError(
            f"A checkpoint must know its training data, and train={shown(train)} is not of type "
            "Encoded: give one, or leave checkpoint out."
        )
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
    tensors = {f"model.{name}": _copy(value) for name, value in model.state_dict().items()}
    numbers = {}
    for name, parameter in _trained(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{key}.{name}"] = _copy(value)
            else:  # bitsandbytes counts its steps in a plain number
                numbers[f"{key}.{name}"] = optimizer_state.to_json(value)
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
    own = model.state_dict()
    weights = {name: tensors.get(f"model.{name}") for name in own}
    wrong = [
        name
        for name, value in own.items()
        if (held := weights[name]) is None or (held.shape, held.dtype) != (value.shape, value.dtype)
    ]
    # The scales of weights in 4 bits are made with the model and cannot be loaded.
    fixed = own.keys() - {name for name, _ in loadable(model)}
    wrong += [
        name for name in fixed - set(wrong) if not torch.equal(weights[name], own[name].cpu())
    ]
    wrong += optimizer_state.strange(tensors, note["numbers"], dict(_trained(model)))
    if wrong or len(note["losses"]) != note["step"] or not 0 < note["step"] <= recipe.steps:
        raise ValueError(
            f"The state in {folder} is not one of this model "
            f"({', '.join(wrong[:3]) or 'the number of its steps'} differs): another version of "
            "the course saved it, or it is damaged; delete it and start again."
        )
    model.load_state_dict({name: weights[name] for name in own.keys() - fixed}, strict=False)
    states: dict[str, dict[str, Any]] = {}
    for full in tensors:
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            key, name = rest.split(".", 1)
            states.setdefault(name, {})[key] = tensors[full]
    for name, parameter in _trained(model):
        held_states = states.get(name, {})
        optimizer.state[parameter] = {k: t.to(parameter.device) for k, t in held_states.items()}
    for rest, value in note["numbers"].items():
        key, name = rest.split(".", 1)
        optimizer.state[model.get_parameter(name)][key] = optimizer_state.from_json(value)
    optimizer_state.restore(optimizer, note.get("groups", []))
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


def loadable(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What `load_state_dict` fills: the parameters under all their names, and the buffers."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)
