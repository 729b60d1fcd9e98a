"""A fine-tune's state in one file, from which a killed run goes on to the same weights.

The file holds what training changes: trained weights, optimizer states, random generators, losses.
It is of the safetensors format, no pickle, and is written beside the old one and renamed over it,
so that a kill at any moment leaves the old state or the new one. What is read is compared with its
digest, and with the recipe, the training data and the kind of device: a state that is damaged, or
of another run, is refused in one sentence before anything is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from helpers.data import Encoded
from helpers.recipe import Recipe
from tight_fit.checks import shown
from tight_fit.command.arguments import no_place

FILE = "state.safetensors"
UNFINISHED = ".unfinished"  # a folder: what a killed save leaves is in it
LOCK = ".lock"
FORMAT = "3"  # the second held frozen weights as well


class Diverged(ArithmeticError):
    """The loss, or a weight or optimizer state, has become infinite or NaN."""


@contextmanager
def held(folder: str | Path) -> Iterator[Path]:
    """Hold a folder for one run: made if necessary, locked, cleared of what killed saves left.

    A kill releases the lock. Raises TypeError or ValueError for what is no path of this machine,
    OSError where nothing can be written, RuntimeError where another run holds the folder.
    """
    name = f"checkpoint={shown(f'{folder}')}"
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{name} must be the path of a folder, or None for none.")
    text = os.fspath(folder)
    if not text.strip() or "\0" in text:
        raise ValueError(f"{name} names no folder: give one, such as 'runs/first', or None.")
    if why := no_place(text):
        raise ValueError(f"{name} {why}.")
    place = Path(folder).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(place / LOCK, timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise RuntimeError(
            f"Another run is using {name}: wait until it ends, or use another folder."
        ) from None
    except (OSError, NotImplementedError) as error:
        raise OSError(
            f"{name} cannot be written to, or cannot be locked ({_cause(error)}): choose a folder "
            "that can."
        ) from error
    shutil.rmtree(place / UNFINISHED, ignore_errors=True)
    try:
        yield place
    finally:
        lock.release()


def owner(recipe: Recipe, train: Encoded, device: torch.device) -> dict[str, Any]:
    """What a state belongs to: recipe, training data (a digest of every token, pixel and label, and
    of how batches are made of them) and kind of device.

    Raises TypeError for data of your own, of which nobody knows what it holds.
    """
    if not isinstance(train, Encoded):
        raise TypeError(
            f"A checkpoint cannot tell data of type {type(train).__name__} from others: give an "
            "Encoded split, or leave checkpoint out."
        )
    data = digest(repr((train.pixels, train.trim)), train.columns | {"": train.lengths})
    return {"recipe": recipe.to_dict(), "data": data, "device": device.type}


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
    Raises Diverged where a weight or state is not finite, OSError where the disk is full or
    read-only. What was there is kept each time.
    """
    trained = _trained(model)
    tensors: dict[str, torch.Tensor] = {f"model.{name}": trained[name] for name in trained}
    numbers = {}
    for name, parameter in trained.items():
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
    note |= {"numbers": numbers, "scaler": scaler.state_dict()}
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    text = json.dumps(note, allow_nan=False)
    metadata = {"format": FORMAT, "fine_tune": text, "digest": digest(text, copies)}
    new = folder / UNFINISHED / FILE
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        save_file(copies, new, metadata=metadata)
        with new.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(new, folder / FILE)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"The state of step {step} could not be saved in {folder} ({_cause(error)}), and a "
            "state that was there is whole: free space, or use another folder, and run again."
        ) from error
    finally:
        shutil.rmtree(new.parent, ignore_errors=True)


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
    note, tensors = _read(folder)
    _refuse_another(note["of"], of, folder)
    trained = _trained(model)
    for name, parameter in trained.items():
        saved = tensors.get(f"model.{name}")
        if saved is None or saved.shape != parameter.shape:
            raise ValueError(
                f"The state in {folder} is not one of this model ({name} differs): another version "
                "of the course saved it; delete it and start again."
            )
    for name, parameter in trained.items():
        with torch.no_grad():
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


def advice(folder: Path | None) -> str:
    """What to do after a run has diverged, as the end of a sentence."""
    again = (
        f", and start anew in another folder, as a state that was saved in {folder} leads here "
        "again"
    )
    return "lower learning_rate, lengthen warmup, or use precision='fp32'" + again * bool(folder)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(what `save` noted, tensors in CPU memory) of the state in a folder."""
    damaged = f"{FILE} in {folder} is not a saved fine-tune or is damaged"
    try:
        with safe_open(folder / FILE, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(
            f"{damaged} ({_cause(error)}): delete it, and the run starts again."
        ) from error
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"{folder / FILE} cannot be read now ({_cause(error)}), and may be whole: keep it, and "
            "run again when this is mended."
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{FILE} in {folder} has format {metadata.get('format', 'none')[:20]!r}, and this "
            f"version reads format {FORMAT}: use the version that saved it, or delete it and start "
            "again."
        )
    if digest(metadata.get("fine_tune", ""), tensors) != metadata.get("digest"):
        raise ValueError(
            f"{damaged} (its content does not match its digest): delete it, and the run starts "
            "again."
        )
    return json.loads(metadata["fine_tune"]), tensors


def _refuse_another(there: dict[str, Any], mine: dict[str, Any], folder: Path) -> None:
    """Raises ValueError, in one sentence, where a state belongs to another run."""
    if there == mine:
        return
    changes = ", ".join(
        f"{name}={there['recipe'].get(name)!r} there, {value!r} now"
        for name, value in mine["recipe"].items()
        if there["recipe"].get(name) != value
    )
    if changes:
        what = f"by another recipe ({changes})"
    elif there["data"] != mine["data"]:
        what = "on other training data"
    else:
        what = f"on another device ({there['device']} there, {mine['device']} now)"
    raise ValueError(f"The state in {folder} was saved {what}: use another folder, or delete it.")


def _cause(error: Exception) -> str:
    """What an error of the system or of safetensors says, in one line without paths."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return said.partition(" at path ")[0].partition(" (os error ")[0][:120]
