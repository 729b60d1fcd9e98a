"""Saving and going on: optimizers that count elsewhere, files that cannot be read now, addresses.

A state that is whole must come back whole, or be refused before much is done; and nobody is told to
delete a state that may be whole.
"""

import math
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from helpers import state_file, train
from helpers.recipe import Recipe, replace
from helpers.state_file import FILE
from tests.attack import refused
from tight_fit.command.arguments import new_file, new_folder
from tight_fit.techniques.optimizers import make_optimizer

RECIPE = Recipe(model="vit", steps=4, batch_size=4, train_size=16)


def fit(folder, recipe=RECIPE, **more):
    settings = {"device": "cpu", "progress": False, "save_every": 1, **more}
    return train.fit(recipe, checkpoint=folder, **settings)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A folder with the state of step 2 of 4."""
    folder = tmp_path_factory.mktemp("half")
    stopped(folder, RECIPE)
    return folder


@pytest.fixture
def folder(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "runs"))


class Stopped(Exception):
    """Ends a run after two steps, as a kill does."""


def stopped(folder, recipe, **more):
    real, calls = train.train_step, []

    def step(*arguments, **keywords):
        if len(calls) == 2:
            raise Stopped
        calls.append(1)
        return real(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", step)
        with pytest.raises(Stopped):
            fit(folder, recipe, **more)


def weights(result):
    return [value.detach() for value in result.model.parameters()]


# -- runs that go on must end where they would have ended


class Counts(torch.optim.SGD):
    """SGD that keeps things of its own, and slows down by them."""

    def step(self, closure=None):
        for group in self.param_groups:
            count = self.count(group)
            group["lr"] /= count
        return super().step(closure)


class InGroup(Counts):
    """Counts in its group, as apex' fused optimizers do."""

    def count(self, group):
        group["count"] = group.get("count", 0) + 1
        group["limit"] = math.inf
        return group["count"]


class InNumbers(Counts):
    """Keeps an infinite number per parameter."""

    def count(self, group):
        for value in group["params"]:
            state = self.state[value]
            state["n"] = state.get("n", 0) + 1
            state["least"] = math.inf
        return state["n"]


class InItself(Counts):
    n = 0

    def count(self, group):
        self.n += 1
        return self.n


class InTensor(Counts):
    def count(self, group):
        self.n = getattr(self, "n", torch.zeros(1)) + 1
        return self.n.item()


class Elsewhere(Counts):
    def count(self, group):
        self.state["all"] = {"n": self.state.get("all", {}).get("n", 0) + 1}
        return self.state["all"]["n"]


class InStateDict(Counts):
    def count(self, group):
        return 1

    def state_dict(self):
        return {**super().state_dict(), "more": 1}


def of(value):
    """An optimizer that keeps such a value per parameter."""

    class Keeps(Counts):
        def count(self, group):
            for parameter in group["params"]:
                self.state[parameter].update(value)
            return 1

    return Keeps


def made(kind):
    return lambda model, recipe: kind(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    "recipe, optimizer",
    [
        (RECIPE, made(InGroup)),
        (RECIPE, made(InNumbers)),
        (RECIPE, made(torch.optim.NAdam)),
        (Recipe("decoder", steps=4, batch_size=4, train_size=16, base="nf4", lora_rank=4), None),
        (replace(RECIPE, optimizer="lion8bit"), None),
    ],
    ids=["a count in the group", "infinite numbers", "NAdam", "NF4", "lion8bit"],
)
def test_a_run_that_goes_on_ends_at_the_same_weights(recipe, optimizer, tmp_path):
    more = {"optimizer": optimizer or make_optimizer}
    whole = train.fit(recipe, device="cpu", progress=False, **more)
    stopped(tmp_path, recipe, **more)
    again = fit(tmp_path, recipe, **more)
    assert len(again.seconds) == 2
    assert all(map(torch.equal, weights(whole), weights(again)))


@pytest.mark.parametrize(
    "kind, says",
    [(InItself, "its attribute 'n'"), (InTensor, "its attribute 'n'"),
     (Elsewhere, "no trained parameter"), (InStateDict, "'more' of its state_dict"),
     (of({"h": [torch.ones(1)]}), "of type list"), (of({"h": np.ones(3)}), "of type ndarray"),
     (of({"h": (1, 2)}), "of type tuple"), (of({"h": {1: 2}}), "of type dict"),
     (of({"h": 1j}), "of type complex"), (of({3: torch.ones(1)}), "is no text")],
)  # fmt: skip
def test_an_optimizer_that_would_not_come_back_whole_is_refused_after_one_step(
    kind, says, tmp_path, monkeypatch
):
    taken, real = [], train.train_step
    monkeypatch.setattr(train, "train_step", lambda *a, **k: taken.append(1) or real(*a, **k))
    refused(
        TypeError,
        ["cannot be saved", says, "leave checkpoint out"],
        lambda: fit(tmp_path, optimizer=made(kind), save_every=4),
    )
    assert len(taken) == 1 and not (tmp_path / FILE).exists()
    assert len(train.fit(RECIPE, None, "cpu", progress=False, optimizer=made(kind)).losses) == 4


class OwnData:
    """Data that `fit` takes, and a checkpoint cannot tell from others."""

    def __init__(self):
        self.inner = train.encoded(RECIPE)["train"]
        self.lengths = self.inner.lengths

    def __len__(self):
        return len(self.inner)

    def batch(self, rows, device):
        return self.inner.batch(rows, device)


def test_data_that_nobody_can_compare_are_refused_with_a_checkpoint(tmp_path):
    refused(TypeError, "leave checkpoint out", lambda: fit(tmp_path, train=OwnData()))
    assert len(train.fit(RECIPE, OwnData(), "cpu", progress=False).losses) == 4


# -- what cannot be read now may be whole


@pytest.mark.parametrize("error", [OSError(5, os.strerror(5)), RuntimeError("unable to open (5)")])
def test_what_cannot_be_read_now_is_kept(error, folder, monkeypatch):
    before = (folder / FILE).read_bytes()
    monkeypatch.setattr(state_file, "safe_open", Mock(side_effect=error))
    said = refused(OSError, ["cannot be read now", "keep it"], lambda: fit(folder))
    assert "delete" not in said and (folder / FILE).read_bytes() == before


def test_a_link_whose_disk_is_not_there_does_not_start_a_run_again(folder, tmp_path):
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(tmp_path / "not mounted" / FILE)
    refused(OSError, [FILE, "cannot be read now", "keep it"], lambda: fit(folder))
    assert (folder / FILE).is_symlink()


# -- places that are none on this machine

ADDRESSES = ["s3://bucket/run", "gs://b/x", "file:///tmp/x", "hdfs://h/x", "https://h/x", "r2:/x"]
VARIABLES = ["$HOME/runs", "${SCRATCH}/runs", "$TMPDIR"]


@pytest.mark.parametrize("name", [*ADDRESSES, *VARIABLES, "~nosuchuser/runs"])
def test_a_place_that_is_not_on_this_machine_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = "home folder" if name[0] == "~" else "variable" if name[0] == "$" else "an address"
    refused(ValueError, ["checkpoint=", says], lambda: fit(name))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [new_file, new_folder])
@pytest.mark.parametrize("name", [*ADDRESSES, *VARIABLES])
def test_an_output_that_is_not_on_this_machine_is_refused(kind, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="an address|a variable"):
        kind(name)
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_name_begins_with_a_dollar_is_one_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("$mine").mkdir()
    assert new_folder("$mine") == Path("$mine")
