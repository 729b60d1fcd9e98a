"""Which profile runs here, and why: full models on a GPU, mini ones elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch

from helpers import hub, models
from helpers.recipe import DATASETS, MODELS, PROFILES, Recipe

VARIABLE = "TIGHT_FIT_PROFILE"
OFFLINE = {
    "text": "newsgroups",
    "image": "digits",
}  # data that needs no hub, for the full architectures


@dataclass(frozen=True)
class Profile:
    """`name` "mini" or "full"; `device` "cuda" or "cpu"; `reason` one line for the reader."""

    name: str
    device: str
    reason: str


@lru_cache(maxsize=1)
def usable_cuda() -> tuple[bool, str]:
    """(whether a CUDA kernel really runs here, one line of why not and what to do).

    `torch.cuda.is_available()` is true on cards that this build of PyTorch has no kernels for, such as a P100.
    """
    if not torch.cuda.is_available():
        return False, "no GPU found"
    try:
        torch.zeros(8, device="cuda").add_(1).sum().item()
        return True, ""
    except (
        Exception
    ) as error:  # a card without kernels, a driver too old, a card that is full: each its own type
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return False, (
            f"there is a GPU, but it cannot run this PyTorch ({first}); on Kaggle choose the T4 accelerator, "
            "elsewhere install a PyTorch built for the card"
        )


def choose() -> Profile:
    """The profile of this machine. TIGHT_FIT_PROFILE=mini or full overrides it (ValueError for another value)."""
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked and asked not in PROFILES:
        raise ValueError(f"{VARIABLE}={asked!r} is not known: use mini or full, or leave it unset.")
    cuda, why = usable_cuda()
    device = "cuda" if cuda else "cpu"
    if asked:
        return Profile(asked, device, f"{VARIABLE} asks for it")
    if cuda:
        return Profile("full", device, f"a GPU is here: {torch.cuda.get_device_name(0)}")
    return Profile("mini", device, why)


def recipe(model: str = "deberta", **fields) -> Recipe:
    """A recipe in this machine's profile. Where the hub cannot give the full weights or data, the full architecture
    runs with random weights on data that needs no hub; `weights` then says so, in every table and record."""
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
    """One line: model, weights, data, device."""
    kind = "pretrained" if recipe.weights == "pretrained" else "random weights"
    return f"{recipe.model} ({recipe.profile}, {kind}) on {recipe.dataset}, {DATASETS[recipe.dataset].classes} classes"
