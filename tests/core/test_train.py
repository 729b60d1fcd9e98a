"""The loop: repeatable, resumable, and honest when it cannot go on."""

import gc
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import checkpoint, models, train
from helpers.plan import OutOfMemory, or_explain
from helpers.recipe import Recipe, replace
from tests.night import few_by_day

SHORT = Recipe(
    model="vit", steps=5, batch_size=8, accumulation=2, train_size=20
)  # 20 rows: a partial third group
TEXT = Recipe(steps=5, batch_size=4, length=16, train_size=30, accumulation=2)


def weights(fit):
    return {name: value.clone() for name, value in fit.model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("recipe", [SHORT, TEXT], ids=["vit", "deberta"])
def test_the_same_recipe_gives_the_same_run_bit_for_bit(recipe):
    torch.manual_seed(123)  # whatever happened before
    one = train.fit(recipe, device="cpu", progress=False)
    torch.rand(17)
    two = train.fit(recipe, device="cpu", progress=False)
    assert one.losses == two.losses and same(weights(one), weights(two))
    assert train.fit(replace(recipe, seed=1), device="cpu", progress=False).losses != one.losses


@pytest.mark.parametrize(
    "recipe",
    few_by_day(
        [
            SHORT,
            TEXT,
            replace(SHORT, precision="fp16"),
            replace(TEXT, padding="uniform", steps=3, lora_rank=2, optimizer="adamw8bit_embed32"),
        ]
    ),
    ids=["vit", "deberta", "fp16", "uniform-lora"],
)
def test_killed_at_any_step_and_resumed_the_weights_are_the_same(recipe, tmp_path, monkeypatch):
    whole = train.fit(recipe, device="cpu", progress=False)
    real = train.train_step
    for dies_in in range(recipe.steps):
        calls = 0

        def step(*arguments, dies_in=dies_in, **keywords):
            nonlocal calls
            if calls == dies_in:
                raise KeyboardInterrupt
            calls += 1
            return real(*arguments, **keywords)

        folder = tmp_path / str(dies_in)
        monkeypatch.setattr(train, "train_step", step)
        with pytest.raises(KeyboardInterrupt):
            train.fit(recipe, device="cpu", checkpoint=folder, save_every=2, progress=False)
        monkeypatch.setattr(train, "train_step", real)
        torch.manual_seed(dies_in)  # another session
        resumed = train.fit(recipe, device="cpu", checkpoint=folder, save_every=2, progress=False)
        assert resumed.losses == whole.losses and resumed.skipped == whole.skipped
        assert len(resumed.seconds) == recipe.steps - dies_in // 2 * 2, (
            "it went on from the last save"
        )
        assert same(weights(resumed), weights(whole)), f"killed in step {dies_in}"


LONG = replace(SHORT, steps=40)
CHILD = """
import sys
from helpers import train
from helpers.recipe import Recipe
recipe = Recipe.from_dict(eval(sys.argv[2]))
train.fit(recipe, device="cpu", checkpoint=sys.argv[1], save_every=3, progress=False)
"""


def test_a_killed_process_resumes_to_the_same_weights(tmp_path):
    """SIGKILL, as a hosted session ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), repr(LONG.to_dict())],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    while child.poll() is None and not (tmp_path / checkpoint.FILE).exists():
        time.sleep(0.005)
    child.kill()
    assert child.wait() == -signal.SIGKILL, "the child ended before it could be killed"
    resumed = train.fit(LONG, device="cpu", checkpoint=tmp_path, progress=False)
    assert 0 < len(resumed.seconds) < LONG.steps
    whole = train.fit(LONG, device="cpu", progress=False)
    assert resumed.losses == whole.losses and same(weights(resumed), weights(whole))


def test_a_loss_that_is_no_number_stops_the_run(monkeypatch):
    real, calls = train.train_step, 0

    def step(*arguments, **keywords):
        nonlocal calls
        calls += 1
        return real(*arguments) * (float("nan") if calls == 3 else 1)

    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(train.Diverged, match="nan at step 3"):
        train.fit(SHORT, device="cpu", progress=False)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_says_what_would_fit_and_lets_go(monkeypatch, error):
    from tight_fit import gpus

    alive = []

    def step(model, *rest, **keywords):
        alive.append(weakref.ref(model))
        kept = torch.zeros(1000)  # a tensor in the failed frame
        alive.append(weakref.ref(kept))
        raise error

    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(gpus, "here", lambda: gpus.GPUS["T4"])
    recipe = Recipe(profile="full", model="deberta", batch_size=64, weights="random", data="r8")
    small = replace(recipe, profile="mini")
    monkeypatch.setattr(train.models, "build", lambda recipe, device: REAL_BUILD(small, device))
    with pytest.raises(OutOfMemory) as caught:
        or_explain(
            recipe, lambda: train.fit(recipe, train.encoded(small)["train"], "cpu", progress=False)
        )
    message = str(caught.value)
    assert "T4" in message
    assert "more than" in message
    assert "accumulation=" in message
    assert "\n" not in message
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    error.__traceback__ = None  # the test itself made the error and holds it
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


REAL_BUILD = models.build


def test_other_errors_pass_through(monkeypatch):
    def step(*arguments, **keywords):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train.fit(SHORT, device="cpu", progress=False)


@pytest.mark.parametrize(
    "asked, disabled, shown", [(True, "0", True), (True, "1", False), (False, "0", False)]
)
def test_a_bar_is_there_where_it_is_asked_for(asked, disabled, shown, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_DISABLE", disabled)
    assert list(train._progress_bar(SHORT, 2, asked)) == [2, 3, 4]
    assert bool(capsys.readouterr().err) is shown


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 200),
    accumulation=st.integers(1, 8),
    micro=st.integers(1, 8),
    seed=st.integers(0, 5),
)
def test_every_row_exactly_once_an_epoch(rows, accumulation, micro, seed):
    recipe = Recipe(batch_size=accumulation * micro, accumulation=accumulation, seed=seed)
    steps = math.ceil(rows / recipe.batch_size)
    for epoch in range(2):
        groups = [train.rows_of_step(recipe, rows, epoch * steps + step) for step in range(steps)]
        assert sorted(row for group in groups for part in group for row in part) == list(
            range(rows)
        )
        assert all(1 <= len(part) <= micro for group in groups for part in group)
        assert all(sum(map(len, group)) == recipe.batch_size for group in groups[:-1])
    assert groups == [train.rows_of_step(recipe, rows, steps + step) for step in range(steps)]


def test_accuracy_is_that_of_a_plain_count():
    recipe = Recipe(model="vit", steps=1)
    model = models.build(recipe)
    split = train.encoded(recipe)["test"]
    batch = split.batch(range(len(split)))
    labels = batch.pop("labels")
    model.eval()
    with torch.no_grad():
        expected = (model(**batch).logits.argmax(-1) == labels).float().mean().item()
    model.train()
    assert train.evaluate(model, split, recipe, batch_size=37) == pytest.approx(expected, abs=1e-6)
    assert model.training


def test_encoded_data_that_a_caller_changes_is_not_changed_in_the_next_call():
    recipe = TEXT
    for part, split in train.encoded(recipe).items():
        before = train.encoded(recipe)[part]
        split.columns["labels"].fill_(-1)
        split.lengths.zero_()
        after = train.encoded(recipe)[part]
        assert torch.equal(after.columns["labels"], before.columns["labels"])
        assert torch.equal(after.lengths, before.lengths) and int(after.lengths.min()) > 0
