"""Checkpoints: damaged, mixed up, full disks, weights that are not finite."""

import json
import resource
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace as changed
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from helpers import checkpoint, train
from helpers.checkpoint import FILE
from helpers.recipe import Recipe, replace
from tests.attack import refused

RECIPE = Recipe(model="vit", steps=3, batch_size=4, train_size=12)


def fit(folder, recipe=RECIPE, **more):
    settings = {"device": "cpu", "progress": False, "save_every": 1, **more}
    return train.fit(recipe, checkpoint=folder, **settings)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with the state of step 3, the last one."""
    folder = tmp_path_factory.mktemp("done")
    fit(folder)
    return folder


@pytest.fixture
def folder(done, tmp_path):
    return Path(shutil.copytree(done, tmp_path / "runs"))


@pytest.fixture
def no_step(monkeypatch):
    """A run that takes a step fails: what is wrong must be said before."""

    def step(*_, **__):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(train, "train_step", step)


def rewritten(folder, tensors=lambda found: None, note=lambda found: None, **metadata):
    """Write the state again after `tensors` and `note` changed it in place, with its old digest."""
    with safe_open(folder / FILE, "pt") as file:
        kept = dict(file.metadata())
        held = {key: file.get_tensor(key) for key in file.keys()}
    text = json.loads(kept["fine_tune"])
    tensors(held)
    note(text)
    kept |= {"fine_tune": json.dumps(text)} | metadata
    save_file(held, folder / FILE, {key: value for key, value in kept.items() if value is not None})


def bytes_changed(change):
    def act(folder):
        content = bytearray((folder / FILE).read_bytes())
        (folder / FILE).write_bytes(bytes(change(content)))

    return act


def zeroed(share):
    """4 KiB of zeros at this share of the file."""

    def change(content):
        start = int(share * (len(content) - 4096))
        content[start : start + 4096] = bytes(4096)
        return content

    return bytes_changed(change)


def flipped(content):
    content[len(content) // 2] ^= 1
    return content


def without(prefix):
    def change(held):
        for name in [name for name in held if name.startswith(prefix)]:
            del held[name]

    return lambda folder: rewritten(folder, change)


def swapped(held):
    queries = [name for name in held if name.startswith("model.") and "q_proj.weight" in name]
    held[queries[0]], held[queries[1]] = held[queries[1]], held[queries[0]]


def note(**values):
    return lambda folder: rewritten(folder, note=lambda found: found.update(values))


# What the digest sees of a tensor, of its name and of the note: tests/core/test_checkpoint.py.
DAMAGE = {
    "empty": bytes_changed(lambda content: b""),
    "eight bytes": bytes_changed(lambda content: content[:8]),
    "half of the header": bytes_changed(lambda content: content[:500]),
    "half": bytes_changed(lambda content: content[: len(content) // 2]),
    "one byte short": bytes_changed(lambda content: content[:-1]),
    "one byte long": bytes_changed(lambda content: content + b"x"),
    "only zeros": bytes_changed(lambda content: bytes(len(content))),
    "git-lfs": bytes_changed(lambda content: b"version https://git-lfs.github.com/spec/v1\n"),
    "a header too large": bytes_changed(lambda content: b"\xff" * 8 + content[8:]),
    "a pickle": lambda folder: torch.save({"step": 3}, folder / FILE),
    **{f"4 KiB of zeros at {share}": zeroed(share) for share in (0.0, 0.5, 1.0)},
    "one bit": bytes_changed(flipped),
    "no optimizer": without("optimizer."),
    "no weights": without("model."),
    "no random state": without("random."),
    "no tensor": without(""),
    "two weights swapped": lambda folder: rewritten(folder, swapped),
    "a step less": note(step=2),
    "step as text": note(step="3"),
    "another recipe in the note": note(of={}),
    "a note that is no JSON": lambda folder: rewritten(folder, fine_tune="{"),
    "a note that is a list": lambda folder: rewritten(folder, fine_tune="[]"),
    "no note": lambda folder: rewritten(folder, fine_tune=None),
    "no digest": lambda folder: rewritten(folder, digest=None),
    "another digest": lambda folder: rewritten(folder, digest="0" * 32),
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
    return changed(split, columns=columns)


def other_pixel(columns):
    columns["pixel_values"][0, 0, 0, 0] ^= 1


def other_order(columns):
    columns |= {name: values.flip(0) for name, values in columns.items()}


OTHERS = {
    "a pixel": ({"train": lambda: of_other_data(other_pixel)}, "training data="),
    "an order": ({"train": lambda: of_other_data(other_order)}, "training data="),
    "steps": ({"recipe": lambda: replace(RECIPE, steps=4)}, "steps=3 there, 4 now"),
    "an optimizer": (
        {"recipe": lambda: replace(RECIPE, optimizer="sgd")},
        "optimizer='adamw' there, 'sgd' now",
    ),
    "a model": ({"recipe": lambda: replace(RECIPE, model="deberta")}, "model='vit' there"),
    "frozen": ({"recipe": lambda: replace(RECIPE, frozen=2)}, "frozen=None there, 2 now"),
}


@pytest.mark.parametrize("arguments, words", OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_run_is_refused_and_kept(arguments, words, folder, no_step):
    before = (folder / FILE).read_bytes()
    values = {name: make() for name, make in arguments.items()}
    refused(ValueError, ["use another folder", words], lambda: fit(folder, **values))
    assert (folder / FILE).read_bytes() == before


def test_a_state_of_another_device_is_refused(folder, no_step):
    with safe_open(folder / FILE, "pt") as file:
        note = json.loads(file.metadata()["fine_tune"])
        held = {key: file.get_tensor(key) for key in file.keys()}
    note["of"]["device"] = "cuda"
    text = json.dumps(note)
    digest = checkpoint.digest(text, held)
    rewritten(folder, fine_tune=text, digest=digest)
    refused(ValueError, "device='cuda' there, 'cpu' now", lambda: fit(folder))


# -- folders


NO_FOLDERS = [
    *((name, ValueError, "names no folder") for name in ("", " ", "\t")),
    *((name, ValueError, "null") for name in ("a\0b",)),
    *((name, TypeError, "") for name in (3, True, b"runs", ["runs"])),
    *((name, OSError, "") for name in (
        "/dev/null", "/dev/null/runs", "/proc/runs", "/proc/self/runs", "x" * 300, __file__)),
]  # fmt: skip


@pytest.mark.parametrize("name, error, says", NO_FOLDERS)
def test_what_is_no_folder_or_cannot_be_made_is_refused_before_a_step(
    name, error, says, no_step, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = Path(__file__).read_bytes()
    with pytest.raises(error, match=says):
        fit(name)
    assert Path(__file__).read_bytes() == before and not list(tmp_path.iterdir())


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


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A folder with the state of step 2, after which the run was interrupted."""
    real, calls = train.train_step, []

    def step(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", step)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_disk_that_fills_up_leaves_the_old_state(size, stopped):
    before = (stopped / FILE).read_bytes()
    with files_end_at(size), pytest.raises((OSError, SafetensorError)):
        fit(stopped)
    assert (stopped / FILE).read_bytes() == before
    assert [path.name for path in stopped.iterdir()] == [FILE]
    assert len(fit(stopped).seconds) == 1


# -- runs that diverge


def poisoned(value, at=3):
    """A step that leaves this value in a weight after step `at`, and in no loss."""
    real, calls = train.train_step, []

    def step(model, *arguments, **keywords):
        loss = real(model, *arguments, **keywords)
        calls.append(1)
        if len(calls) == at:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = value
        return loss

    return step


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_not_saved(value, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train_step", poisoned(value))
    words = ["not finite after step 3", "another folder", "leads here again"]
    refused(train.Diverged, words, lambda: fit(tmp_path))
    assert step_of(tmp_path) == 2
    assert not list(tmp_path.glob("**/*unfinished*"))


def test_states_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    real = train.train_step

    def broken(model, optimizer, *arguments, **keywords):
        loss = real(model, optimizer, *arguments, **keywords)
        next(iter(optimizer.state.values()))["exp_avg"].fill_(float("inf"))
        return loss

    monkeypatch.setattr(train, "train_step", broken)
    words = ["optimizer.exp_avg", "not finite after step 1"]
    refused(train.Diverged, words, lambda: fit(tmp_path))
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_a_run_that_diverges_calls_no_state_good(rate, tmp_path):
    recipe = replace(RECIPE, steps=6, learning_rate=rate, optimizer="sgd", warmup=0.0)
    words = ["lower learning_rate", "another folder"]
    refused(train.Diverged, words, lambda: fit(tmp_path, recipe))
    if (tmp_path / FILE).exists():
        with safe_open(tmp_path / FILE, "pt") as file:
            held = [file.get_tensor(key) for key in file.keys()]
        assert all(value.isfinite().all() for value in held if value.is_floating_point())


def step_of(folder):
    """The optimizer steps that a saved state has done."""
    with safe_open(folder / FILE, "pt") as file:
        return json.loads(file.metadata()["fine_tune"])["step"]
