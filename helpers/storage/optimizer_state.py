"""What an optimizer keeps beside tensors, as JSON and back, and which optimizers cannot be saved.

A state of an optimizer is saved per parameter and per group: tensors, numbers and texts. Some
optimizers keep a count in a group, an infinite number, or more than that in places of their own.
The first two come back as they were; the last is refused after the first step, as a run that
goes on without them would be another run, and nobody would notice.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

LEFT = ("params", "lr")  # of a group: the learning rate follows from recipe and step
PLAIN = (bool, int, float, str, type(None))
INFINITE = "not finite"  # the key of what JSON has no number for
_first: WeakKeyDictionary[torch.optim.Optimizer, list] = WeakKeyDictionary()


def to_json(value: Any) -> Any:
    """A number as JSON holds it: NaN and the infinities as texts, in an object."""
    return {INFINITE: repr(value)} if _infinite(value) else value


def from_json(value: Any) -> Any:
    """The number of `to_json`."""
    return float(value[INFINITE]) if isinstance(value, dict) and INFINITE in value else value


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group with which the optimizer began, as JSON gives them back.

    They are looked at once: what an optimizer counts in its groups is none of its settings.
    """
    if optimizer not in _first:
        found = [
            {key: to_json(value) for key, value in group.items() if key not in LEFT}
            | {"parameters": len(group["params"])}
            for group in optimizer.param_groups
        ]
        text = json.dumps(found, default=lambda value: type(value).__name__)
        _first[optimizer] = json.loads(text)
    return _first[optimizer]


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group holds now, beside parameters and learning rate, where it is plain."""
    return [
        {
            key: to_json(value)
            for key, value in group.items()
            if key not in LEFT and type(value) in PLAIN
        }
        for group in optimizer.param_groups
    ]


def gathered(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """({"optimizer." key "." parameter: tensor}, {key "." parameter: number}) of its states."""
    tensors, numbers = {}, {}
    for name, parameter in trained.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{key}.{name}"] = value
            else:  # bitsandbytes counts its steps in a plain number
                numbers[f"{key}.{name}"] = to_json(value)
    return tensors, numbers


def put(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    note: Mapping[str, Any],
) -> None:
    """Put back what `gathered` and `groups` gave, which the note has as "numbers" and "groups"."""
    states: dict[str, dict[str, Any]] = {name: {} for name in trained}
    for full in tensors:
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            key, name = rest.split(".", 1)
            states[name][key] = tensors[full].to(trained[name].device)
    for rest, value in note["numbers"].items():
        key, name = rest.split(".", 1)
        states[name][key] = from_json(value)
    for name, parameter in trained.items():
        optimizer.state[parameter] = states[name]
    for group, values in zip(optimizer.param_groups, note.get("groups", [])):
        group.update({key: from_json(value) for key, value in values.items()})


def strange(
    tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], trained: Mapping[str, Any]
) -> list[str]:
    """The names of saved states of an optimizer that are of none of the `trained` parameters."""
    full = [name.partition(".")[2] for name in tensors if name.startswith("optimizer.")]
    return [name for name in (*full, *numbers) if name.partition(".")[2] not in trained]


def missing(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    trained: Mapping[str, nn.Parameter],
) -> list[str]:
    """The names of states that this optimizer keeps, and that are saved for no parameter.

    What it keeps is tried out on one number, where it can be: some need a GPU. A parameter that
    gets no gradient has no state, so not each must have one; a matrix that has some must have all.
    """
    full = [name.removeprefix("optimizer.") for name in tensors if name.startswith("optimizer.")]
    saved: dict[str, set[str]] = {}
    for name in (*full, *numbers):
        key, _, of = name.partition(".")
        saved.setdefault(of, set()).add(key)
    if not saved:
        return [f"optimizer.{key}" for key in sorted(_keys(optimizer))] if trained else []
    if not type(optimizer).__module__.startswith("torch."):
        return []  # 8-bit optimizers keep other things for small parameters
    same = {of: keys for of, keys in saved.items() if of in trained and trained[of].dim() > 1}
    most = set().union(*same.values())
    return [f"optimizer.{key}.{of}" for of, keys in same.items() for key in sorted(most - keys)]


def _keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """What an optimizer keeps for a parameter after a step; empty where that cannot be tried."""
    tried = nn.Parameter(torch.ones(2, 2))
    tried.grad = torch.ones(2, 2)
    try:
        taken = inspect.signature(type(optimizer)).parameters
        settings = {key: value for key, value in optimizer.defaults.items() if key in taken}
        twin = type(optimizer)([tried], **settings)
        twin.step()
        return set(twin.state[tried])
    except Exception:  # each library has its own
        return set()


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


def _infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
