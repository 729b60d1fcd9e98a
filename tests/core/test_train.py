"""The loop: repeatable, resumable, and honest when it cannot go on."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch

from helpers import checkpoint, models, train
from helpers.plan import OutOfMemory, or_explain
from helpers.recipe import Recipe, replace
from tests.night import few_by_day
from tests.small import ROOT
from tight_fit import gpus
from tight_fit.optimizer_kinds import OPTIMIZERS

# 20 rows: a partial third group
SHORT = Recipe(model="vit", steps=5, batch_size=8, accumulation=2, train_size=20)
TEXT = Recipe(steps=5, batch_size=4, length=16, train_size=30, accumulation=2)
UNIFORM = replace(TEXT, padding="uniform", steps=3, lora_rank=2, optimizer="adamw8bit_embed32")


def same(one, other):
    """Whether two runs had the same losses and ended with the same weights."""
    held, there = one.model.state_dict(), other.model.state_dict()
    assert one.losses == other.losses and one.skipped == other.skipped
    return held.keys() == there.keys() and all(
        torch.equal(held[name], there[name]) for name in held
    )


RESUMED = {
    "vit": SHORT, "deberta": TEXT, "fp16": replace(SHORT, precision="fp16"),
    "uniform-lora": UNIFORM, "on the host": replace(SHORT, offload="optimizer"),
    "adamw_stochastic": replace(SHORT, optimizer="adamw_stochastic", base="bf16"),
    **{name: replace(SHORT, optimizer=name) for name in OPTIMIZERS
       if name not in ("adamw", "adamw_stochastic")},
}  # fmt: skip


@pytest.mark.parametrize(
    "recipe", few_by_day(RESUMED.values(), lambda one: one in (SHORT, RESUMED["fp16"])), ids=RESUMED
)
def test_killed_at_any_step_and_resumed_the_weights_are_the_same(recipe, tmp_path, monkeypatch):
    torch.manual_seed(123)  # whatever happened before
    whole = train.fit(recipe, device="cpu", progress=False)
    other = train.fit(replace(recipe, seed=1), device="cpu", progress=False)
    assert other.losses != whole.losses
    real = train.train_step
    for dies_in in range(recipe.steps):
        calls = 0

        def step(*arguments, dies_in=dies_in, **keywords):
            nonlocal calls
            if calls == dies_in:
                raise KeyboardInterrupt
            calls += 1
            return real(*arguments, **keywords)

        kept = {"checkpoint": tmp_path / str(dies_in), "save_every": 2}
        monkeypatch.setattr(train, "train_step", step)
        with pytest.raises(KeyboardInterrupt):
            train.fit(recipe, device="cpu", progress=False, **kept)
        monkeypatch.setattr(train, "train_step", real)
        torch.manual_seed(dies_in)  # another session
        resumed = train.fit(recipe, device="cpu", progress=False, **kept)
        left = recipe.steps - dies_in // 2 * 2
        assert len(resumed.seconds) == left, "it went on from the last save"
        assert same(resumed, whole), f"killed in step {dies_in}"


CHILD = """
import sys
from helpers import train
from helpers.recipe import Recipe
recipe = Recipe.from_dict(eval(sys.argv[2]))
train.fit(recipe, device="cpu", checkpoint=sys.argv[1], save_every=3, progress=False)
"""


def test_a_killed_process_resumes_to_the_same_weights(tmp_path):
    """SIGKILL, as a hosted session ends."""
    long = replace(SHORT, steps=40)
    words = [sys.executable, "-c", CHILD, str(tmp_path), repr(long.to_dict())]
    child = subprocess.Popen(words, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    while child.poll() is None and not (tmp_path / checkpoint.FILE).exists():
        time.sleep(0.005)
    child.kill()
    assert child.wait() == -signal.SIGKILL, "the child ended before it could be killed"
    resumed = train.fit(long, device="cpu", checkpoint=tmp_path, progress=False)
    assert 0 < len(resumed.seconds) < long.steps
    assert same(resumed, train.fit(long, device="cpu", progress=False))


def test_a_loss_that_is_no_number_stops_the_run_and_other_errors_pass_through(monkeypatch):
    real, calls = train.train_step, 0

    def step(*arguments, **keywords):
        nonlocal calls
        calls += 1
        return real(*arguments) * (float("nan") if calls == 3 else 1)

    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(train.Diverged, match="nan at step 3"):
        train.fit(SHORT, device="cpu", progress=False)

    def broken(*arguments, **keywords):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(train, "train_step", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train.fit(SHORT, device="cpu", progress=False)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_says_what_would_fit_and_lets_go(monkeypatch, error):
    alive, build = [], models.build

    def step(model, *rest, **keywords):
        kept = torch.zeros(1000)  # a tensor in the failed frame
        alive.extend([weakref.ref(model), weakref.ref(kept)])
        raise error

    recipe = Recipe(profile="full", model="deberta", batch_size=64, weights="random", data="r8")
    small = replace(recipe, profile="mini")
    data = train.encoded(small)["train"]
    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(gpus, "here", lambda: gpus.GPUS["T4"])
    monkeypatch.setattr(train.models, "build", lambda recipe, device: build(small, device))
    with pytest.raises(OutOfMemory) as caught:
        or_explain(recipe, lambda: train.fit(recipe, data, "cpu", progress=False))
    message = str(caught.value)
    assert "T4" in message and "more than" in message and "accumulation=" in message
    assert "\n" not in message
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    error.__traceback__ = None  # the test itself made the error and holds it
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


@pytest.mark.parametrize(
    "asked, disabled, shown", [(True, "0", True), (True, "1", False), (False, "0", False)]
)
def test_a_bar_is_there_where_it_is_asked_for(asked, disabled, shown, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_DISABLE", disabled)
    assert list(train._progress_bar(SHORT, 2, asked)) == [2, 3, 4]
    assert bool(capsys.readouterr().err) is shown


def test_accuracy_is_that_of_a_plain_count():
    recipe = Recipe(model="vit", steps=1)
    model, split = models.build(recipe), train.encoded(recipe)["test"]
    batch = split.batch(range(len(split)))
    labels = batch.pop("labels")
    model.eval()
    with torch.no_grad():
        expected = (model(**batch).logits.argmax(-1) == labels).float().mean().item()
    model.train()
    assert train.evaluate(model, split, recipe, batch_size=37) == pytest.approx(expected, abs=1e-6)
    assert model.training


def test_encoded_data_that_a_caller_changes_is_not_changed_in_the_next_call():
    for part, split in train.encoded(TEXT).items():
        before = train.encoded(TEXT)[part]
        split.columns["labels"].fill_(-1)
        split.lengths.zero_()
        after = train.encoded(TEXT)[part]
        assert torch.equal(after.columns["labels"], before.columns["labels"])
        assert torch.equal(after.lengths, before.lengths) and int(after.lengths.min()) > 0
