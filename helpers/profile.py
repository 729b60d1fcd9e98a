"""This machine: which profile runs on it, and what a record says of it.

The full models run on a GPU, the mini ones elsewhere.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from helpers import gpus, hub, models
from helpers.recipe import DATASETS, MODELS, Recipe
from helpers.values import PROFILES

VARIABLE = "TIGHT_FIT_PROFILE"
# By task: data that needs no hub, for the full architectures.
OFFLINE = {"text": "newsgroups", "image": "digits"}


@dataclass(frozen=True)
class Profile:
    """The profile of this machine.

    name    "mini" or "full"
    device  "cuda" or "cpu"
    reason  why this profile was chosen, in one line for the reader
    """

    name: str
    device: str
    reason: str


def usable_cuda() -> tuple[bool, str]:
    """(whether a CUDA kernel really runs here, one line that says why not and what to do).

    See `gpus.probe`, which asks another process, and only once.
    """
    return gpus.probe()


def choose() -> Profile:
    """The profile of this machine; TIGHT_FIT_PROFILE=mini or full overrides it.

    Raises ValueError for another value of TIGHT_FIT_PROFILE.
    """
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted and wanted not in PROFILES:
        raise ValueError(
            f"{VARIABLE}={wanted!r} is not known: use mini or full, or leave it unset."
        )
    cuda, why = usable_cuda()
    device = "cuda" if cuda else "cpu"
    if wanted:
        return Profile(wanted, device, f"{VARIABLE} asks for it")
    if cuda:
        return Profile("full", device, f"a GPU is here: {torch.cuda.get_device_name(0)}")
    return Profile("mini", device, why)


def recipe(model: str = "deberta", **fields) -> Recipe:
    """A recipe in the profile of this machine; `fields` are those of `Recipe`.

    Where the hub cannot give the full weights or the data, the full architecture runs with random
    weights, and image models run on data that needs no hub. The recipe's `weights` then says so, in
    every table and record. Raises ValueError or TypeError as `Recipe` does.
    """
    fields.setdefault("profile", choose().name)
    if fields["profile"] == "full":
        if "weights" not in fields and hub.available("model", models.REPOS[model]) is None:
            fields["weights"] = "random"
        task = MODELS[model].task
        if (
            "data" not in fields
            and task == "image"
            and hub.available("dataset", "uoft-cs/cifar10") is None
        ):
            fields["data"] = OFFLINE[task]
    return Recipe(model=model, **fields)


def describe(recipe: Recipe) -> str:
    """The recipe's model, profile, weights and data set, in one line."""
    kind = "pretrained" if recipe.weights == "pretrained" else "random weights"
    classes = DATASETS[recipe.dataset].classes
    return f"{recipe.model} ({recipe.profile}, {kind}) on {recipe.dataset}, {classes} classes"


def environment(device: str | torch.device) -> dict[str, str | int | None]:
    """Device, driver, versions and threads of this machine, for a record."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    processor = platform.processor() or platform.machine()
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if cuda else processor,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.system(),
        "threads": torch.get_num_threads(),
    }


def _driver() -> str | None:
    """The version of NVIDIA's driver as Linux shows it, or None."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf8")
    except OSError:
        return None
    return driver_version(text)


def driver_version(text: str) -> str | None:
    """The version in the driver's own text: its first line names the kernel module, then it."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\b", text)
    return match[1] if match else None
