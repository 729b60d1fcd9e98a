"""A fine-tune's state in one file, from which a killed run goes on to the same weights.

The file holds what training changes: trained weights, optimizer states, random generators, losses.
It is of the safetensors format, no pickle, and is written beside the old one and renamed over it,
so that a kill at any moment leaves the old state or the new one. What is read is compared with its
digest, and with the recipe, the training data and the kind of device. Equal ones give equal
weights, so that two runs that share a folder do each other no harm.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from helpers.data import Encoded
from helpers.recipe import Recipe
from tight_fit.checks import of_type, shown
from tight_fit.command.arguments import no_place

FILE = "state.safetensors"


class Diverged(ArithmeticError):
    """The loss, or a weight or optimizer state, has become infinite or NaN."""


def made(folder: str | Path) -> Path:
    """The folder of states, made if necessary.

    Raises TypeError or ValueError for what is no path of this machine, OSError where it cannot be
    made.
    """
    place = Path(folder).expanduser()
    why = no_place(os.fspath(folder)) or ("" if str(folder).strip() else "names no folder")
    if why:
        raise ValueError(f"checkpoint={shown(str(folder))} {why}.")
    place.mkdir(parents=True, exist_ok=True)
    return place


def owner(recipe: Recipe, train: Encoded, device: torch.device) -> dict[str, Any]:
    """What a state belongs to: recipe, training data (a digest of every token, pixel and label, and
    of how batches are made of them) and kind of device. Raises TypeError for data of your own.
    """
    of_type("train with a checkpoint", train, Encoded)
    data = digest(repr((train.pixels, train.trim)), train.columns | {"": train.lengths})
    return {"recipe": recipe.to_dict(), "training data": data, "device": device.type}


def digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE2b (RFC 7693, 16 bytes, in hexadecimal) of a text and of tensors.

    Names, dtypes, shapes and values count; the order of the tensors and their device do not.
    """
    total = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"\0{name} {value.dtype} {tuple(value.shape)}\0".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def save(
    folder: Path,
    of: dict[str, Any],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    losses: list[float],
    skipped: list[int],
) -> None:
    """Write the state after `step` optimizer steps to `folder`/state.safetensors, atomically.

    of       the state's `owner`
    skipped  the steps that changed nothing because a gradient overflowed in fp16
    Raises Diverged where a weight or state is not finite, OSError or SafetensorError where the disk
    is full or read-only. What was there is kept each time.
    """
    tensors, numbers = {}, {}
    for name, parameter in _trained(model).items():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{key}.{name}"] = value
            else:  # bitsandbytes counts its steps in a plain number
                numbers[f"{key}.{name}"] = value
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise Diverged(f"{name} is not finite after step {step}: {advice(folder)}.")
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    note = {"of": of, "step": step, "losses": losses, "skipped": skipped}
    text = json.dumps(note | {"numbers": numbers, "scaler": scaler.state_dict()})
    copies = {name: value.cpu().contiguous().clone() for name, value in tensors.items()}
    unfinished = folder / f".{os.getpid()}.unfinished"
    try:
        save_file(copies, unfinished, {"fine_tune": text, "digest": digest(text, copies)})
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(unfinished, folder / FILE)
    finally:
        unfinished.unlink(missing_ok=True)


def load(
    folder: Path,
    of: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> tuple[int, list[float], list[int]]:
    """Put a saved state into model, optimizer, scaler and generators.

    Returns (optimizer steps done, their losses, the steps that were skipped); (0, [], []) where
    nothing was saved yet. Raises ValueError, before anything is changed, for a state of another
    `owner`, and for one that is damaged; OSError for one that cannot be read now.
    """
    if not os.path.lexists(folder / FILE):  # a link to a disk that is not there is no new start
        return 0, [], []
    metadata: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(folder / FILE, "pt") as file:
            metadata |= file.metadata() or {}
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError:
        pass  # without a digest it is as damaged as with a wrong one
    if digest(metadata.get("fine_tune", ""), tensors) != metadata.get("digest"):
        raise ValueError(
            f"{FILE} in {folder} is not a saved fine-tune or is damaged: delete it, and the run "
            "starts again."
        )
    note = json.loads(metadata["fine_tune"])
    if note["of"] != of:
        changes = _changes(note["of"] | note["of"]["recipe"], of | of["recipe"])
        raise ValueError(
            f"The state in {folder} is of another run ({changes}): use another folder, or delete "
            "it."
        )
    trained = _trained(model)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"model.{name}"])
            optimizer.state[parameter] = {}
    for full, value in tensors.items():
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            optimizer.state[trained[name]][key] = value.to(trained[name].device)
    for full, number in note["numbers"].items():
        key, _, name = full.partition(".")
        optimizer.state[trained[name]][key] = number
    scaler.load_state_dict(note["scaler"])
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return note["step"], note["losses"], note["skipped"]


def _changes(there: dict[str, Any], here: dict[str, Any]) -> str:
    """In what two owners differ, each with its recipe's fields beside its own."""
    names = [name for name in here if name != "recipe" and there.get(name) != here[name]]
    return ", ".join(f"{name}={there.get(name)!r} there, {here[name]!r} now" for name in names)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def advice(folder: Path | None) -> str:
    """What to do after a run has diverged, as the end of a sentence."""
    again = f", and start anew in another folder, as a state in {folder} leads here again"
    return "lower learning_rate, lengthen warmup, or use precision='fp32'" + again * bool(folder)
