"""Checkpoints: damaged, mixed up, written by two runs, full disks, weights that are not finite."""

import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace as changed
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from helpers import checkpoint, models, state_file, train
from helpers.recipe import Recipe, replace
from helpers.state_file import FILE, UNFINISHED
from tests.attack import refused
from tight_fit.techniques.optimizers import make_optimizer

RECIPE = Recipe(model="vit", steps=3, batch_size=4, train_size=12)
HALF = replace(RECIPE, optimizer="sgd")


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


def rewritten(folder, tensors=lambda found: None, note=lambda found: None, name=FILE, **metadata):
    """Write the state again after `tensors` and `note` changed it in place, with its old digest."""
    with safe_open(folder / name, "pt") as file:
        kept = dict(file.metadata())
        held = {key: file.get_tensor(key) for key in file.keys()}
    text = json.loads(kept["fine_tune"])
    tensors(held)
    note(text)
    kept |= {"fine_tune": json.dumps(text)} | metadata
    save_file(held, folder / name, {key: value for key, value in kept.items() if value is not None})


def bytes_changed(change):
    def act(folder):
        content = bytearray((folder / FILE).read_bytes())
        (folder / FILE).write_bytes(bytes(change(content)))

    return act


def zeroed(share, count=4096):
    def change(content):
        start = int(share * (len(content) - count))
        content[start : start + count] = bytes(count)
        return content

    return bytes_changed(change)


def flipped(share):
    def change(content):
        content[int(share * (len(content) - 1))] ^= 1
        return content

    return bytes_changed(change)


def without(prefix):
    def change(held):
        for name in [name for name in held if name.startswith(prefix)]:
            del held[name]

    return lambda folder: rewritten(folder, change)


def first(held, prefix):
    return next(name for name in held if name.startswith(prefix))


def tensor(prefix, change):
    def act(held):
        name = first(held, prefix)
        held[name] = change(held[name]).contiguous()

    return lambda folder: rewritten(folder, act)


def swapped(held):
    one, other = [name for name in held if name.startswith("model.") and "q_proj.weight" in name][
        :2
    ]
    held[one], held[other] = held[other], held[one]


def note(**values):
    return lambda folder: rewritten(folder, note=lambda found: found.update(values))


DAMAGE = {
    "empty": bytes_changed(lambda content: b""),
    "eight bytes": bytes_changed(lambda content: content[:8]),
    "half of the header": bytes_changed(lambda content: content[:500]),
    "half": bytes_changed(lambda content: content[: len(content) // 2]),
    "one byte short": bytes_changed(lambda content: content[:-1]),
    "one byte long": bytes_changed(lambda content: content + b"x"),
    "only zeros": bytes_changed(lambda content: bytes(len(content))),
    "text": bytes_changed(lambda content: b"not a state at all"),
    "git-lfs": bytes_changed(lambda content: b"version https://git-lfs.github.com/spec/v1\n"),
    "a header too large": bytes_changed(lambda content: b"\xff" * 8 + content[8:]),
    "a pickle": lambda folder: torch.save({"step": 3}, folder / FILE),
    **{f"4 KiB of zeros at {share}": zeroed(share) for share in (0.0, 0.1, 0.4, 0.6, 0.8, 1.0)},
    "four zeros": zeroed(0.5, 4),
    **{f"one bit at {share}": flipped(share) for share in (0.3, 0.5, 0.7, 0.9, 1.0)},
    "no optimizer": without("optimizer."),
    "no first moments": without("optimizer.exp_avg."),
    "no steps of the optimizer": without("optimizer.step."),
    "no weights": without("model."),
    "no bias": without("model.classifier.bias"),
    "no random state": without("random."),
    "no tensor": without(""),
    "another shape": tensor("model.classifier.weight", lambda held: held.T),
    "another dtype": tensor("model.classifier.weight", lambda held: held.half()),
    "a NaN": tensor("model.", lambda held: held * float("nan")),
    "states of zeros": tensor("optimizer.exp_avg_sq.", torch.zeros_like),
    "another random state": tensor("random.cpu", lambda held: held.roll(1)),
    "two weights swapped": lambda folder: rewritten(folder, swapped),
    "a tensor more": lambda folder: rewritten(folder, lambda h: h.update({"x": torch.ones(1)})),
    "a step less": note(step=2),
    "a step more": note(step=4),
    "step -1": note(step=-1),
    "step as text": note(step="3"),
    "other losses": note(losses=[0.0, 0.0, 0.0]),
    "a skipped step": note(skipped=[1]),
    "another recipe in the note": note(belongs={}),
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


@pytest.mark.parametrize("number, word", [(None, "format 'none'"), ("3", "format '3'")])
def test_another_format_is_said(number, word, folder, no_step):
    rewritten(folder, format=number)
    refused(ValueError, [word, "delete it"], lambda: fit(folder))


# -- states of other runs


def of_other_data(change):
    split = train.encoded(RECIPE)["train"]
    columns = {name: values.clone() for name, values in split.columns.items()}
    change(columns)
    return changed(split, columns=columns)


def other_pixel(columns):
    columns["pixel_values"][0, 0, 0, 0] ^= 1


def other_label(columns):
    columns["labels"][-1] = (columns["labels"][-1] + 1) % 10


def other_order(columns):
    columns |= {name: values.flip(0) for name, values in columns.items()}


def adamw(**settings):
    return lambda model, recipe: torch.optim.AdamW(model.parameters(), **settings)


def half_trained(model, recipe):
    return torch.optim.AdamW(list(model.parameters())[:-2], weight_decay=0.01, fused=True)


OTHERS = {
    "a pixel": ({"train": lambda: of_other_data(other_pixel)}, "on other training data"),
    "a label": ({"train": lambda: of_other_data(other_label)}, "on other training data"),
    "an order": ({"train": lambda: of_other_data(other_order)}, "on other training data"),
    "SGD": (
        {"optimizer": lambda: lambda model, recipe: torch.optim.SGD(model.parameters())},
        "with another optimizer (AdamW there, SGD now)",
    ),
    "betas": ({"optimizer": lambda: adamw(betas=(0.5, 0.9))}, "with other settings of AdamW"),
    "eps": ({"optimizer": lambda: adamw(eps=1e-3)}, "with other settings of AdamW"),
    "amsgrad": ({"optimizer": lambda: adamw(amsgrad=True)}, "with other settings of AdamW"),
    "fewer weights": ({"optimizer": lambda: half_trained}, "with other settings of AdamW"),
    "steps": ({"recipe": lambda: replace(RECIPE, steps=4)}, "steps=3 there, 4 now"),
    "rate": ({"recipe": lambda: replace(RECIPE, learning_rate=0.1)}, "learning_rate=None there"),
    "a model": ({"recipe": lambda: replace(RECIPE, model="deberta")}, "model='vit' there"),
    "precision": ({"recipe": lambda: replace(RECIPE, precision="bf16")}, "precision='fp32' there"),
    "frozen": ({"recipe": lambda: replace(RECIPE, frozen=2)}, "frozen=None there, 2 now"),
}


@pytest.mark.parametrize("arguments, words", OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_run_is_refused_and_kept(arguments, words, folder, no_step):
    before = (folder / FILE).read_bytes()
    values = {name: make() for name, make in arguments.items()}
    refused(ValueError, ["use another folder", words], lambda: fit(folder, **values))
    assert (folder / FILE).read_bytes() == before


def test_a_state_of_another_device_is_refused(folder, no_step):
    def elsewhere(found):
        found["belongs"]["device"] = "cuda"

    with safe_open(folder / FILE, "pt") as file:
        found = json.loads(file.metadata()["fine_tune"])
        held = {key: file.get_tensor(key) for key in file.keys()}
    elsewhere(found)
    state_file.write(folder, state_file.State(found, held))
    refused(ValueError, "another device (cuda there, cpu now)", lambda: fit(folder))


def test_save_alone_refuses_the_state_of_another_run_too(folder):
    model = models.build(HALF)
    before = (folder / FILE).read_bytes()
    refused(
        ValueError,
        "optimizer='adamw' there, 'sgd' now",
        lambda: checkpoint.save(folder, HALF, 1, model, make_optimizer(model, HALF), [1.0]),
    )
    assert (folder / FILE).read_bytes() == before


# -- folders


@pytest.mark.parametrize("name", ["", " ", "\t", "a\0b"])
def test_a_folder_without_a_name_is_refused(name, no_step):
    refused(ValueError, "names no folder", lambda: fit(name))


@pytest.mark.parametrize("name", [3, True, b"runs", ["runs"], 0, object()])
def test_what_is_no_path_is_refused(name, no_step):
    refused(TypeError, "must be the path of a folder", lambda: fit(name))


@pytest.mark.parametrize("name", ["/dev/null", "/dev/null/runs", "/proc/runs", "/proc/self/runs"])
def test_a_folder_that_cannot_be_made_is_refused_before_a_step(name, no_step):
    refused(OSError, ["cannot be written to", "choose a folder"], lambda: fit(name))


def test_a_file_in_the_folder_s_place_is_refused(tmp_path, no_step):
    (tmp_path / "runs").write_text("mine")
    refused(OSError, "cannot be written to", lambda: fit(tmp_path / "runs"))
    assert (tmp_path / "runs").read_text() == "mine"


def test_a_path_that_is_too_long_is_refused(tmp_path, no_step):
    refused(OSError, "cannot be written to", lambda: fit(tmp_path / ("x" * 300)))


def test_a_full_disk_is_said_before_a_step(folder, no_step, monkeypatch):
    (folder / FILE).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    refused(OSError, "has 0 bytes left", lambda: fit(folder))


def test_a_read_only_disk_is_said_before_a_step(folder, no_step, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(state_file.filelock, "FileLock", read_only)
    refused(OSError, ["Read-only file system", "choose a folder"], lambda: fit(folder))


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


@pytest.mark.parametrize("size", [1, 5_000, 100_000, 1_000_000])
def test_a_disk_that_fills_up_leaves_the_old_state(size, stopped):
    before = (stopped / FILE).read_bytes()
    with files_end_at(size):
        refused(OSError, "the state of step 2 there is whole", lambda: fit(stopped))
    assert (stopped / FILE).read_bytes() == before
    assert not (stopped / UNFINISHED).exists()
    assert len(fit(stopped).seconds) == 1


def test_a_disk_that_fills_up_at_the_first_save_says_that_nothing_is_there(tmp_path):
    with files_end_at(5_000):
        refused(OSError, "no state was there before", lambda: fit(tmp_path))


def test_a_second_run_is_refused_while_the_first_one_runs(folder, no_step):
    with state_file.held(folder):
        refused(RuntimeError, ["Another run is using", "another folder"], lambda: fit(folder))


def test_a_second_run_of_a_thread_is_refused(folder, no_step):
    said = []

    def second():
        said.append(refused(RuntimeError, "Another run is using", lambda: fit(folder)))

    with state_file.held(folder):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert said


HOLDER = """
import sys, time
from pathlib import Path
from helpers import state_file
with state_file.held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_refused_and_a_killed_one_lets_go(folder, monkeypatch):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        refused(RuntimeError, "Another run is using", lambda: fit(folder))
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert fit(folder).seconds == []


@pytest.mark.parametrize("left", [f"{UNFINISHED}/{FILE}", f"{UNFINISHED}/.tmpAbC123"])
def test_what_a_killed_save_left_is_cleared(left, folder):
    (folder / left).parent.mkdir(exist_ok=True)
    (folder / left).write_bytes(b"half")
    fit(folder)
    assert not (folder / left).exists()


@pytest.mark.parametrize("mine", ["notes.txt", ".tmpfile-of-mine", "other.safetensors"])
def test_what_others_left_stays(mine, folder):
    (folder / mine).write_bytes(b"mine")
    fit(folder)
    assert (folder / mine).read_bytes() == b"mine"


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_not_saved(value, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train_step", poisoned(value))
    words = ["not finite after step 3", "the state of step 2 in", "leads here again"]
    refused(train.Diverged, words, lambda: fit(tmp_path))
    assert state_file.read(tmp_path).note["step"] == 2
    assert not list(tmp_path.glob("**/*unfinished*"))


def test_states_that_are_not_finite_are_not_saved(tmp_path):
    def broken(model, recipe):
        optimizer = make_optimizer(model, recipe)
        optimizer.register_step_post_hook(
            lambda o, *_: next(iter(o.state.values()))["exp_avg"].fill_(float("inf"))
        )
        return optimizer

    words = ["optimizer.exp_avg", "not finite after step 1"]
    said = refused(train.Diverged, words, lambda: fit(tmp_path, optimizer=broken))
    assert "kept" not in said and state_file.read(tmp_path) is None


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_a_run_that_diverges_calls_no_state_good(rate, tmp_path):
    recipe = replace(RECIPE, steps=6, learning_rate=rate, optimizer="sgd", warmup=0.0)
    said = refused(train.Diverged, "lower learning_rate", lambda: fit(tmp_path, recipe))
    assert "good" not in said
    kept = state_file.read(tmp_path)
    assert (kept is not None) == ("in another folder" in said)
    for value in kept.tensors.values() if kept else ():
        assert not value.is_floating_point() or value.isfinite().all()
