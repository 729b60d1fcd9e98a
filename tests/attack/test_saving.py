"""Saving and going on: optimizers and data of one's own, files that cannot be read now, addresses.

A state that is whole must come back whole, or be refused before a step; and nobody is told to
delete a state that may be whole.
"""

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from helpers import checkpoint, train
from helpers.checkpoint import FILE
from helpers.recipe import Recipe, replace
from tests.attack import refused
from tight_fit.command.arguments import new_file, new_folder

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


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        Recipe("decoder", steps=4, batch_size=4, train_size=16, base="nf4", lora_rank=4),
        replace(RECIPE, optimizer="lion8bit"),
        replace(RECIPE, frozen=1),
        replace(RECIPE, offload="optimizer"),
    ],
    ids=["AdamW", "NF4", "lion8bit", "frozen layers", "states on the host"],
)
def test_a_run_that_goes_on_ends_at_the_same_weights(recipe, tmp_path):
    whole = train.fit(recipe, device="cpu", progress=False)
    stopped(tmp_path, recipe)
    again = fit(tmp_path, recipe)
    assert len(again.seconds) == 2
    assert all(map(torch.equal, weights(whole), weights(again)))


def test_an_optimizer_of_ones_own_is_refused_with_a_checkpoint(tmp_path, monkeypatch):
    taken, real = [], train.train_step
    monkeypatch.setattr(train, "train_step", lambda *a, **k: taken.append(1) or real(*a, **k))

    def own(model, recipe):
        return torch.optim.NAdam(model.parameters())

    refused(TypeError, "leave checkpoint out", lambda: fit(tmp_path, optimizer=own))
    assert not taken and not (tmp_path / FILE).exists()
    assert len(train.fit(RECIPE, None, "cpu", progress=False, optimizer=own).losses) == 4


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
    refused(TypeError, "of type Encoded", lambda: fit(tmp_path, train=OwnData()))
    assert len(train.fit(RECIPE, OwnData(), "cpu", progress=False).losses) == 4


# -- what cannot be read now may be whole


@pytest.mark.parametrize("error", [OSError(5, os.strerror(5)), RuntimeError("unable to open (5)")])
def test_what_cannot_be_read_now_is_kept(error, folder, monkeypatch):
    before = (folder / FILE).read_bytes()
    monkeypatch.setattr(checkpoint, "safe_open", Mock(side_effect=error))
    with pytest.raises(type(error)) as caught:
        fit(folder)
    assert "delete" not in str(caught.value) and (folder / FILE).read_bytes() == before


def test_a_link_whose_disk_is_not_there_does_not_start_a_run_again(folder, tmp_path):
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(tmp_path / "not mounted" / FILE)
    with pytest.raises(OSError):
        fit(folder)
    assert (folder / FILE).is_symlink()


# -- places that are none on this machine

ADDRESSES = ["s3://bucket/run", "gs://b/x", "file:///tmp/x", "hdfs://h/x", "https://h/x", "r2:/x"]
VARIABLES = ["$HOME/runs", "${SCRATCH}/runs", "$TMPDIR"]


@pytest.mark.parametrize("name", [*ADDRESSES, *VARIABLES])
def test_a_place_that_is_not_on_this_machine_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = "variable" if name[0] == "$" else "an address"
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
