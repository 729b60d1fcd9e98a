"""Saving and going on: optimizers that count elsewhere, files that cannot be read now, addresses.

A state that is whole must come back whole, or be refused before much is done; and nobody is told to
delete a state that may be whole.
"""

import errno
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from helpers import state_file, train
from helpers.recipe import Recipe, replace
from helpers.state_file import FILE, PREVIOUS, UNFINISHED
from tests.attack import refused
from tight_fit.command.arguments import new_file, new_folder
from tight_fit.techniques.optimizers import make_optimizer

RECIPE = Recipe(model="vit", steps=4, batch_size=4, train_size=16)


def fit(folder, recipe=RECIPE, **more):
    settings = {"device": "cpu", "progress": False, "save_every": 1, **more}
    return train.fit(recipe, checkpoint=folder, **settings)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A folder with the states of steps 2 and 1 of 4."""
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
    [
        (InItself, "its attribute 'n'"),
        (InTensor, "its attribute 'n'"),
        (Elsewhere, "no trained parameter"),
        (InStateDict, "'more' of its state_dict"),
        (of({"h": [torch.ones(1)]}), "of type list"),
        (of({"h": np.ones(3)}), "of type ndarray"),
        (of({"h": (1, 2)}), "of type tuple"),
        (of({"h": {1: 2}}), "of type dict"),
        (of({"h": 1j}), "of type complex"),
        (of({3: torch.ones(1)}), "is no text"),
    ],
)
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


@pytest.mark.parametrize("fault", sorted(state_file.PASSING))
@pytest.mark.parametrize("kind", ["number", "text"])
def test_what_cannot_be_read_now_is_kept(fault, kind, folder, monkeypatch):
    def refuses(*_, **__):
        if kind == "number":
            raise OSError(fault, os.strerror(fault))
        raise RuntimeError(f"unable to open file: {os.strerror(fault)} ({fault})")

    before = {name: (folder / name).read_bytes() for name in (FILE, PREVIOUS)}
    monkeypatch.setattr(state_file, "safe_open", refuses)
    said = refused(OSError, ["cannot be read now", "keep it"], lambda: fit(folder))
    assert "delete" not in said
    assert before == {name: (folder / name).read_bytes() for name in (FILE, PREVIOUS)}


def test_an_older_state_that_cannot_be_read_now_is_not_called_damaged(folder, monkeypatch):
    (folder / FILE).write_bytes(b"damaged")

    def refuses(path, *_):
        if path.name == PREVIOUS:
            raise OSError(errno.EIO, "Input/output error")
        return safe_open(path, "pt")

    monkeypatch.setattr(state_file, "safe_open", refuses)
    said = refused(ValueError, f"{PREVIOUS} cannot be read now", lambda: fit(folder))
    assert f"delete {PREVIOUS}" not in said


@pytest.mark.parametrize("name", [FILE, PREVIOUS])
def test_a_link_whose_disk_is_not_there_does_not_start_a_run_again(name, folder, tmp_path):
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "not mounted" / name)
    refused(OSError, [name, "is a link", "mount its disk"], lambda: fit(folder))
    assert (folder / name).is_symlink()


def test_a_folder_in_the_place_of_the_older_state_is_said_before_a_step(folder, monkeypatch):
    (folder / PREVIOUS).unlink()
    (folder / PREVIOUS).mkdir()
    monkeypatch.setattr(train, "train_step", None)
    words = [f"{PREVIOUS} is a folder", "the state of step 2 there is whole"]
    refused(OSError, words, lambda: fit(folder))


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_what_lies_where_a_save_begins_is_cleared(kind, folder):
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    if kind == "a file":
        (folder / UNFINISHED).write_bytes(b"x")
    else:
        (folder / UNFINISHED).symlink_to("nowhere")
    assert len(fit(folder).seconds) == 2


# -- states that are whole, and that another program wrote


def signed(folder, note=lambda found: None, tensors=lambda held: None):
    """Write the state again, changed, with a digest that is right."""
    with safe_open(folder / FILE, "pt") as file:
        kept = dict(file.metadata())
        held = {key: file.get_tensor(key) for key in file.keys()}
    found = json.loads(kept["fine_tune"])
    found = note(found) or found
    tensors(held)
    text = json.dumps(found)
    kept |= {"fine_tune": text, "digest": state_file.digest(text, held)}
    save_file(held, folder / FILE, kept)


def put(**values):
    return lambda found: found.update(values)


NOTES = {
    **{
        f"without {name}": lambda found, name=name: {k: v for k, v in found.items() if k != name}
        for name in ("belongs", "step", "losses", "skipped", "numbers", "scaler")
    },
    "a list": lambda found: [1],
    "a step of text": put(step="2"),
    "a step of True": put(step=True),
    "a fractional step": put(step=2.0),
    "losses of text": put(losses=["a", "b"]),
    "losses as text": put(losses="ab"),
    "losses of NaN": put(losses=[math.nan, math.nan]),
    "numbers in a list": put(numbers=[1]),
    "a number of no parameter": put(numbers={"step.nosuch": 1}),
    "a number without a name": put(numbers={"x": 1}),
    "skipped as text": put(skipped="a"),
    "another recipe's field": lambda found: found["belongs"].update(recipe={"colour": 1}),
    "no recipe": lambda found: found["belongs"].update(recipe=3),
    "belonging to nothing": put(belongs={}),
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_a_note_of_another_program_is_one_sentence(note, folder, monkeypatch):
    signed(folder, note)
    before = (folder / FILE).read_bytes()
    monkeypatch.setattr(train, "train_step", None)
    refused(ValueError, "version of the course", lambda: fit(folder))
    assert (folder / FILE).read_bytes() == before


TENSORS = {
    "no random state": lambda held: held.pop("random.cpu"),
    "a short random state": lambda held: held.update({"random.cpu": held["random.cpu"][:9]}),
    "a random state of floats": lambda held: held.update({"random.cpu": torch.ones(5056)}),
    "a state of no parameter": lambda held: held.update({"optimizer.exp_avg.x": torch.ones(1)}),
    "a state without a name": lambda held: held.update({"optimizer.": torch.ones(1)}),
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_tensors_of_another_program_are_one_sentence(tensors, folder, monkeypatch):
    signed(folder, tensors=tensors)
    monkeypatch.setattr(train, "train_step", None)
    refused(ValueError, "version of the course", lambda: fit(folder))


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
