"""A fine-tune's whole state in one file: weights, optimizer states, random generators, losses.

A state knows what it belongs to: recipe, optimizer and its settings, training data, kind of device.
`load` gives it back to exactly that, and refuses everything else in one sentence. How the file is
written, and how damage is found: helpers/state_file.py.

A state of an optimizer is saved per parameter and per group: tensors, numbers and texts. Some
optimizers keep a count in a group, an infinite number, or more than that in places of their own.
The first two come back as they were; the last is refused after the first step, as a run that
goes on without them would be another run, and nobody would notice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from helpers.data import Encoded
from helpers.recipe import Recipe, difference
from helpers.state_file import State, digest, peek, read, write
from tight_fit.checks import shown

LEFT = ("params", "lr")  # of a group: the learning rate follows from recipe and step
PLAIN = (bool, int, float, str, type(None))
INFINITE = "not finite"  # the key of what JSON has no number for
_first: WeakKeyDictionary[torch.optim.Optimizer, list] = WeakKeyDictionary()


class Diverged(ArithmeticError):
    """The loss, or a weight or optimizer state, has become infinite or NaN."""


def fingerprint(train: Encoded) -> str:
    """A digest of training data: every token, pixel and label, and how batches are made of them.

    Raises TypeError for data of your own, of which nobody knows what it holds.
    """
    _check_data(train)
    return digest(repr((train.pixels, train.trim)), train.columns | {"": train.lengths})


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
    states, numbers = _gathered(optimizer, _trained(model))
    tensors = {name: _copy(value) for name, value in (tensors | states).items()}
    for name, value in tensors.items():
        if value.is_floating_point() and value.numel() and not value.isfinite().all():
            raise Diverged(f"{name} is not finite after step {step}: {advice(folder)}.")
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    mine = _describe(recipe, model, optimizer, data)
    note = {
        "belongs": mine,
        "step": step,
        "losses": losses,
        "skipped": list(skipped),
        "numbers": numbers,
        "groups": _groups(optimizer),
        "scaler": scaler.state_dict() if scaler is not None else {},
    }
    if there := peek(Path(folder)).get("belongs"):
        _refuse_another(there, mine, Path(folder))
    return write(Path(folder), State(note, tensors))


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
    recipe, optimizer, data set or kind of device, and for one that is damaged: its digest is of
    all that was saved.
    """
    mine = _describe(recipe, model, optimizer, data)
    state = read(Path(folder))
    if state is None:
        return 0, [], []
    note, tensors = state
    _refuse_another(note["belongs"], mine, Path(folder))
    if wrong := _different_weights(model, tensors):
        raise ValueError(
            f"The state in {folder} is not one of this model ({', '.join(wrong[:3])} differs): "
            "another version of the course saved it; delete it and start again."
        )
    _put_weights(model, tensors)
    _put_states(optimizer, _trained(model), tensors, note)
    if scaler is not None and note["scaler"]:
        scaler.load_state_dict(note["scaler"])
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return note["step"], note["losses"], note["skipped"]


def advice(folder: str | Path | None) -> str:
    """What to do after a run has diverged, and what its folder has, as the end of a sentence."""
    step = peek(Path(folder)).get("step", 0) if folder is not None else 0
    kept = (
        f"the state of step {step} in {folder}, kept and finite, leads here again" if step else ""
    )
    again = f", and start anew in another folder, as {kept}" if kept else ""
    return f"lower learning_rate, lengthen warmup, or use precision='fp32'{again}"


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _describe(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, data: str
) -> dict[str, Any]:
    """What a run's state belongs to, as JSON gives it back.

    The learning rate is left out: it follows from recipe and step.

    data  the fingerprint of the training data
    """
    described = {
        "recipe": recipe.to_dict(),
        "optimizer": type(optimizer).__qualname__,
        "settings": _settings(optimizer),
        "data": data,
        "device": next(model.parameters()).device.type,
    }
    return json.loads(json.dumps(described))


def _check_data(train: Any) -> None:
    """Raises TypeError for training data of which no digest can be made."""
    if not all(hasattr(train, name) for name in ("pixels", "trim", "columns", "lengths")):
        raise TypeError(
            f"A checkpoint must know its training data, and train={shown(train)} is not of type "
            "Encoded: give one, or leave checkpoint out."
        )


def _refuse_another(there: dict[str, Any], mine: dict[str, Any], folder: Path) -> None:
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


def _different_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the model's tensors that `tensors` lacks or has in another form.

    tensors  a saved state's: "model." and the tensor's name
    """
    own, fixed, wrong = model.state_dict(), _made_with(model), []
    for name, value in own.items():
        held = tensors.get(f"model.{name}")
        if held is None or (held.shape, held.dtype) != (value.shape, value.dtype):
            wrong.append(name)
        elif name in fixed and not torch.equal(held, value.cpu()):
            wrong.append(name)
    return wrong


def _put_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the saved weights into the model, in place."""
    names = model.state_dict().keys() - _made_with(model)
    model.load_state_dict({name: tensors[f"model.{name}"] for name in names}, strict=False)


def _made_with(model: nn.Module) -> set[str]:
    """What is no parameter and no buffer, under any of its names."""
    filled = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    filled |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return set(model.state_dict().keys() - filled)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group with which the optimizer began, as JSON gives them back.

    They are looked at once: what an optimizer counts in its groups is none of its settings.
    """
    if optimizer not in _first:
        found = [
            {key: _to_json(value) for key, value in group.items() if key not in LEFT}
            | {"parameters": len(group["params"])}
            for group in optimizer.param_groups
        ]
        text = json.dumps(found, default=lambda value: type(value).__name__)
        _first[optimizer] = json.loads(text)
    return _first[optimizer]


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group holds now, beside parameters and learning rate, where it is plain."""
    return [
        {
            key: _to_json(value)
            for key, value in group.items()
            if key not in LEFT and type(value) in PLAIN
        }
        for group in optimizer.param_groups
    ]


def _gathered(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """({"optimizer." key "." parameter: tensor}, {key "." parameter: number}) of its states."""
    tensors, numbers = {}, {}
    for name, parameter in trained.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{key}.{name}"] = value
            else:  # bitsandbytes counts its steps in a plain number
                numbers[f"{key}.{name}"] = _to_json(value)
    return tensors, numbers


def _put_states(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    note: Mapping[str, Any],
) -> None:
    """Put back what `_gathered` and `groups` gave, which the note has as "numbers" and "groups"."""
    states: dict[str, dict[str, Any]] = {name: {} for name in trained}
    for full in tensors:
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            key, name = rest.split(".", 1)
            states[name][key] = tensors[full].to(trained[name].device)
    for rest, value in note["numbers"].items():
        key, name = rest.split(".", 1)
        states[name][key] = _from_json(value)
    for name, parameter in trained.items():
        optimizer.state[parameter] = states[name]
    for group, values in zip(optimizer.param_groups, note.get("groups", [])):
        group.update({key: _from_json(value) for key, value in values.items()})


def _to_json(value: Any) -> Any:
    """A number as JSON holds it: NaN and the infinities as texts, in an object."""
    return (
        {INFINITE: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value
    )


def _from_json(value: Any) -> Any:
    """The number of `_to_json`."""
    return float(value[INFINITE]) if isinstance(value, dict) and INFINITE in value else value


def counters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The numbers that an optimizer keeps as attributes of its own, {name: value}."""
    found = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            found[name] = value.item()
        elif type(value) in (int, float):
            found[name] = value
    return found


def check_savable(
    model: nn.Module, optimizer: torch.optim.Optimizer, before: dict[str, Any]
) -> None:
    """Raises TypeError, in one sentence, for an optimizer whose state would not come back whole.

    before  its `counters` before its first step
    """
    trained = {id(value) for value in model.parameters() if value.requires_grad}
    why = ""
    for key, states in optimizer.state.items():
        if id(key) not in trained:
            why = "it keeps a state of what is no trained parameter of the model"
        elif not isinstance(states, dict):
            why = "its state of a parameter is no dict"
        else:
            for name, value in states.items():
                if not isinstance(value, torch.Tensor) and type(value) not in PLAIN:
                    why = f"{name!r} of its state is of type {type(value).__name__}"
                elif not isinstance(name, str):
                    why = f"{name!r} in its state is no text"
    more = sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
    if more:
        why = f"{more[0]!r} of its state_dict belongs to no parameter"
    changed = [name for name, value in counters(optimizer).items() if before.get(name) != value]
    if changed:
        why = f"it counts in its attribute {changed[0]!r}"
    if why:
        raise TypeError(
            f"A state of {type(optimizer).__qualname__} cannot be saved, as {why}: keep tensors "
            "and numbers in optimizer.state[parameter], or leave checkpoint out."
        )
