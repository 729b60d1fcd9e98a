"""Checkpoints: damaged, mixed up, unreadable, full disks, addresses, weights that are not finite.

A state that is whole must come back whole, or be refused before a step; and nobody is told to
delete a state that may be whole.
"""

import json
import os
import resource
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace as changed
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from helpers import checkpoint, train
from helpers.checkpoint import FILE
from helpers.recipe import Recipe, replace
from tests.attack import refused
from tight_fit.command.arguments import new_file, new_folder

RECIPE = Recipe(model="vit", steps=4, batch_size=4, train_size=12)


def fit(folder, recipe=RECIPE, **more):
    settings = {"device": "cpu", "progress": False, "save_every": 1, **more}
    return train.fit(recipe, checkpoint=folder, **settings)


class Stopped(Exception):
    """Ends a run after two steps, as a kill does."""


def stopped(folder, recipe=RECIPE):
    """Leave the state of step 2 in a folder. Returns the folder."""
    real, calls = train.train_step, []

    def step(*arguments, **keywords):
        if len(calls) == 2:
            raise Stopped
        calls.append(1)
        return real(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(train, "train_step", step)
        fit(folder, recipe)
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    return stopped(tmp_path_factory.mktemp("half"))


@pytest.fixture
def folder(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "runs"))


@pytest.fixture
def no_step(monkeypatch):
    """A run that takes a step fails: what is wrong must be said before."""

    def step(*_, **__):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(train, "train_step", step)


def held(folder):
    """(the tensors, the metadata, the note in it) of a state."""
    with safe_open(folder / FILE, "pt") as file:
        metadata = dict(file.metadata())
        return (
            {key: file.get_tensor(key) for key in file.keys()},
            metadata,
            json.loads(metadata["fine_tune"]),
        )


def rewritten(tensors=lambda found: None, note=lambda found: None, **metadata):
    """Writes a state again after `tensors` and `note` changed it in place, with its old digest."""

    def act(folder):
        found, kept, text = held(folder)
        tensors(found)
        note(text)
        kept |= {"fine_tune": json.dumps(text)} | metadata
        kept = {key: value for key, value in kept.items() if value is not None}
        save_file(found, folder / FILE, kept)

    return act


def bytes_changed(change):
    return lambda folder: (folder / FILE).write_bytes(change((folder / FILE).read_bytes()))


def zeroed(share):
    """4 KiB of zeros at this share of the file."""

    def change(content):
        start = int(share * (len(content) - 4096))
        return content[:start] + bytes(4096) + content[start + 4096 :]

    return bytes_changed(change)


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def without(prefix):
    def change(found):
        for name in [name for name in found if name.startswith(prefix)]:
            del found[name]

    return rewritten(change)


def swapped(found):
    one, other, *_ = (name for name in found if "model." in name and "q_proj.weight" in name)
    found[one], found[other] = found[other], found[one]


# What the digest sees of a tensor, of its name and of the note: tests/core/test_checkpoint.py.
DAMAGE = {
    "empty": bytes_changed(lambda content: b""),
    "half of the header": bytes_changed(lambda content: content[:500]),
    "one byte short": bytes_changed(lambda content: content[:-1]),
    "one byte long": bytes_changed(lambda content: content + b"x"),
    "git-lfs": bytes_changed(lambda content: b"version https://git-lfs.github.com/spec/v1\n"),
    "a header too large": bytes_changed(lambda content: b"\xff" * 8 + content[8:]),
    "a pickle": lambda folder: torch.save({"step": 3}, folder / FILE),
    **{f"4 KiB of zeros at {share}": zeroed(share) for share in (0.0, 0.5, 1.0)},
    "one bit": bytes_changed(flipped),
    **{f"no {part}": without(part) for part in ("optimizer.", "model.", "random.", "")},
    "two weights swapped": rewritten(swapped),
    "a step less": rewritten(note=lambda found: found.update(step=1)),
    "step as text": rewritten(note=lambda found: found.update(step="3")),
    "another recipe in the note": rewritten(note=lambda found: found.update(of={})),
    **{f"{note} as a note": rewritten(fine_tune=note) for note in ("{", "[]", None)},
    **{f"{digest} as digest": rewritten(digest=digest) for digest in (None, "0" * 32)},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_said_before_a_step(damage, folder, no_step):
    damage(folder)
    refused(ValueError, [FILE, "damaged", "delete it"], lambda: fit(folder))


# -- states of other runs


def of_other_data(change):
    split = train.encoded(RECIPE)["train"]
    columns = {name: values.clone() for name, values in split.columns.items()}
    change(columns)
    return {"train": changed(split, columns=columns)}


def other_pixel(columns):
    columns["pixel_values"][0, 0, 0, 0] ^= 1


def other_order(columns):
    columns |= {name: values.flip(0) for name, values in columns.items()}


def of_recipe(**fields):
    return lambda: {"recipe": replace(RECIPE, **fields)}


OTHERS = {
    "a pixel": (lambda: of_other_data(other_pixel), "training data="),
    "an order": (lambda: of_other_data(other_order), "training data="),
    "steps": (of_recipe(steps=5), "steps=4 there, 5 now"),
    "an optimizer": (of_recipe(optimizer="sgd"), "optimizer='adamw' there, 'sgd' now"),
    "a model": (of_recipe(model="deberta"), "model='vit' there"),
}


@pytest.mark.parametrize("arguments, words", OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_run_is_refused_and_kept(arguments, words, folder, no_step):
    before = (folder / FILE).read_bytes()
    refused(ValueError, ["use another folder", words], lambda: fit(folder, **arguments()))
    assert (folder / FILE).read_bytes() == before


def test_a_state_of_another_device_is_refused(folder, no_step):
    tensors, _, note = held(folder)
    note["of"]["device"] = "cuda"
    text = json.dumps(note)
    rewritten(fine_tune=text, digest=checkpoint.digest(text, tensors))(folder)
    refused(ValueError, "device='cuda' there, 'cpu' now", lambda: fit(folder))


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
    again = fit(stopped(tmp_path, recipe), recipe)
    assert len(again.seconds) == 2
    assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))


class OwnData:
    """Data that `fit` takes, and a checkpoint cannot tell from others."""

    def __init__(self):
        inner = train.encoded(RECIPE)["train"]
        self.lengths, self.batch = inner.lengths, inner.batch

    def __len__(self):
        return len(self.lengths)


@pytest.mark.parametrize(
    "own, says",
    [
        (
            lambda: {"optimizer": lambda model, _: torch.optim.NAdam(model.parameters())},
            "leave checkpoint",
        ),
        (lambda: {"train": OwnData()}, "of type Encoded"),
    ],
    ids=["optimizer", "data"],
)
def test_what_a_checkpoint_cannot_compare_trains_without_one_only(own, says, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", None)
        refused(TypeError, says, lambda: fit(tmp_path, **own()))
    assert not (tmp_path / FILE).exists()
    assert len(train.fit(RECIPE, device="cpu", progress=False, **own()).losses) == 4


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


# -- places

ELSEWHERE = {
    **dict.fromkeys(("s3://bucket/run", "file:///tmp/x", "https://h/x", "r2:/x"), "an address"),
    **dict.fromkeys(("$HOME/runs", "${SCRATCH}/runs", "$TMPDIR"), "variable"),
    **dict.fromkeys(("", " ", "\t"), "names no folder|empty"),
}
NO_FOLDERS = [
    *((name, ValueError, says) for name, says in ELSEWHERE.items()),
    ("a\0b", ValueError, "null"),
    *((name, TypeError, None) for name in (3, True, b"runs", ["runs"])),
    *((name, OSError, None) for name in ("/dev/null/runs", "/proc/runs", "x" * 300, __file__)),
]


@pytest.mark.parametrize("name, error, says", NO_FOLDERS)
def test_what_is_no_folder_is_refused_before_a_step(
    name, error, says, no_step, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = Path(__file__).read_bytes()
    with pytest.raises(error, match=says):
        fit(name)
    assert Path(__file__).read_bytes() == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [new_file, new_folder])
@pytest.mark.parametrize("name, says", ELSEWHERE.items())
def test_an_output_of_a_command_lies_on_this_machine(kind, name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=says):
        kind(name)
    Path("$mine").mkdir()
    assert new_folder("$mine") == Path("$mine")  # which is there
    assert [path.name for path in tmp_path.iterdir()] == ["$mine"]


@contextmanager
def files_end_at(size):
    """Every file that this process writes ends there with an error of the system, as on a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_disk_that_fills_up_leaves_the_old_state(size, folder):
    before = (folder / FILE).read_bytes()
    with files_end_at(size), pytest.raises((OSError, SafetensorError)):
        fit(folder)
    assert (folder / FILE).read_bytes() == before
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert len(fit(folder).seconds) == 2


# -- runs that diverge


def first_weight(model, optimizer):
    return next(model.parameters())


def first_state(model, optimizer):
    return next(iter(optimizer.state.values()))["exp_avg"]


@pytest.mark.parametrize(
    "where, value, says",
    [
        (first_weight, "nan", "leads here again"),
        (first_weight, "-inf", "leads here again"),
        (first_state, "inf", "optimizer.exp_avg"),
    ],
)
def test_what_is_not_finite_is_not_saved(where, value, says, tmp_path, monkeypatch):
    real, calls = train.train_step, []

    def step(model, optimizer, *arguments, **keywords):
        loss = real(model, optimizer, *arguments, **keywords)
        calls.append(1)
        if len(calls) == 3:
            with torch.no_grad():
                where(model, optimizer).view(-1)[0] = float(value)
        return loss

    monkeypatch.setattr(train, "train_step", step)
    words = ["not finite after step 3", "another folder", says]
    refused(train.Diverged, words, lambda: fit(tmp_path))
    assert held(tmp_path)[2]["step"] == 2
    assert not list(tmp_path.glob("**/*unfinished*"))


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_a_run_that_diverges_calls_no_state_good(rate, tmp_path):
    recipe = replace(RECIPE, steps=6, learning_rate=rate, optimizer="sgd", warmup=0.0)
    words = ["lower learning_rate", "another folder"]
    refused(train.Diverged, words, lambda: fit(tmp_path, recipe))
    if (tmp_path / FILE).exists():
        tensors = held(tmp_path)[0].values()
        assert all(value.isfinite().all() for value in tensors if value.is_floating_point())
