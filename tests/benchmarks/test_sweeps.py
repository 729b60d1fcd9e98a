"""The runs of a sweep: which is next, what it trains on, and that a kept one comes out again."""

import math
from dataclasses import replace as with_

import numpy as np
import pytest
import torch
import transformers

from benchmarks.sweeps import orders, results, stages, trial
from benchmarks.sweeps.plans import ALL_LINEAR, SWEEPS, SweepPlan
from benchmarks.sweeps.results import Arm
from benchmarks.sweeps.rounded import RoundedAdamW
from helpers import data, models, train
from helpers.recipe import Recipe, replace

VIT = Recipe("vit", train_size=40, test_size=50, batch_size=8, steps=3)
SEEDS = (0, 1, 2, 3, 4)


def hill(top, made=None):
    """A run whose validation accuracy is highest at the learning rate `top`, without training."""

    def run(sweep, arm, rate, seed, steps):
        if made is not None:
            made.append((arm, rate, seed, steps))
        score = 0.9 - 0.05 * abs(math.log2(rate / top)) + 0.001 * seed
        return results.SweepRun(
            arm, rate, seed, steps, score, score, 0.1, 1.0, 1.0, "2026-01-01T00:00:00"
        )

    return run


def plan_of(*arms, **settings):
    return SweepPlan(
        "99_made", "?", VIT, arms or (Arm("a", {}, 1.0), Arm("b", {}, 8.0)), 30, **settings
    )


@pytest.mark.parametrize("top", [0.05, 1.3, 40.0])
def test_the_grid_grows_until_the_best_rate_is_inside(tmp_path, top):
    sweep = stages.opened(plan_of(), "made", tmp_path)
    assert stages.go_on(sweep, SEEDS, folder=tmp_path, run=hill(top))
    for arm in ("a", "b"):
        best = sweep.best(arm)
        assert sweep.finished(arm) and abs(math.log2(best / top)) <= 0.5
        assert set(sweep.at(arm, best, 2 * VIT.steps)) == set(SEEDS)
    assert results.read("99_made", tmp_path) == sweep


def test_a_killed_sweep_goes_on_and_makes_no_run_twice(tmp_path):
    whole, made = stages.opened(plan_of(), "made", tmp_path / "whole"), []
    stages.go_on(whole, SEEDS, folder=tmp_path / "whole", run=hill(3.0, made))

    class Killed(Exception):
        pass

    again, count = [], 0
    while True:
        sweep = stages.opened(plan_of(), "made", tmp_path / "killed")

        def run(*arguments, before=count):
            if len(again) == before + 7:
                raise Killed
            return hill(3.0, again)(*arguments)

        try:
            stages.go_on(sweep, SEEDS, folder=tmp_path / "killed", run=run)
            break
        except Killed:
            count = len(again)
    assert again == made and len(set(made)) == len(made)
    kept = results.read("99_made", tmp_path / "killed")
    assert kept.runs == results.read("99_made", tmp_path / "whole").runs


def test_a_kept_sweep_of_other_settings_is_not_mixed_with_new_runs(tmp_path):
    sweep = stages.opened(plan_of(), "made", tmp_path)
    stages.go_on(sweep, SEEDS, folder=tmp_path, run=hill(1.0))
    with pytest.raises(ValueError, match="has another arms than this one"):
        stages.opened(plan_of(Arm("c", {}, 1.0)), "made", tmp_path)


def test_a_plan_that_gains_an_arm_runs_that_arm_alone(tmp_path):
    first = stages.opened(plan_of(), "made", tmp_path)
    stages.go_on(first, SEEDS, folder=tmp_path, run=hill(1.0))
    before, made = list(first.runs), []
    a, b = first.arms
    more = stages.opened(plan_of(a, Arm("c", {"frozen": 2}, 1.0), b), "made", tmp_path)
    assert stages.go_on(more, SEEDS, folder=tmp_path, run=hill(1.0, made))
    kept = results.read("99_made", tmp_path)
    assert kept.runs[: len(before)] == before and {arm for arm, *_ in made} == {"c"}
    assert [arm.name for arm in kept.arms] == ["a", "c", "b"]


def test_the_same_fine_tune_of_another_sweep_is_taken_from_there(tmp_path):
    first = stages.opened(plan_of(), "made", tmp_path)
    stages.go_on(first, SEEDS, folder=tmp_path, run=hill(1.0))
    renamed = Arm("A", {}, 1.0)
    other = Arm("frozen", {"frozen": 2}, 1.0)
    adapted = Arm("adapted", {}, 1.0, {"lora": {"targets": ["q_proj"], "rank": 2}})
    plan, made = with_(plan_of(renamed, other, adapted), name="98_made"), []
    second = stages.opened(plan, "made", tmp_path)
    stages.go_on(second, SEEDS, folder=tmp_path, run=hill(1.0, made))
    assert {arm for arm, *_ in made} == {"frozen", "adapted"}
    assert second.scores("A") == first.scores("a")


def test_validation_examples_neither_train_nor_test():
    parts = trial.splits(VIT, 30)
    assert [len(part) for part in parts] == [40, 30, 50]
    images = [part.columns["pixel_values"].flatten(1) for part in parts]
    own = train.encoded(VIT)
    assert torch.equal(parts.train.columns["pixel_values"], own["train"].columns["pixel_values"])
    assert torch.equal(parts.test.columns["pixel_values"], own["test"].columns["pixel_values"])
    everything = train.encoded(replace(VIT, train_size=None))["train"].columns["pixel_values"]
    distinct = {tuple(image.tolist()) for image in everything.flatten(1)}
    train_images, validation_images = (
        {tuple(image.tolist()) for image in part} for part in images[:2]
    )
    assert len(distinct) == len(everything) and not train_images & validation_images
    assert validation_images <= distinct
    whole = trial.splits(replace(VIT, train_size=None), 30)
    assert len(whole.train) + 30 == len(everything)
    with pytest.raises(ValueError, match="too few for 1290 to train and 30 to choose"):
        trial.splits(replace(VIT, train_size=1290), 30)


def test_conversations_are_split_by_their_answers():
    """Each topic has the share of the validation examples that it has of the training split."""
    recipe = Recipe("decoder", weights="random", profile="mini", data="r8", test_size=8)
    topics = data.load("r8")["train"]["label"][:]
    answers = trial.classes(train.encoded(recipe)["train"])
    assert len(set(zip(topics, answers))) == len(set(topics)) == len(set(answers)) == 8
    parts = trial.splits(recipe, 500)
    assert len(parts.train) + len(parts.validation) == len(topics)
    most = max(set(answers), key=answers.count)
    share = trial.classes(parts.validation).count(most) / 500
    assert share == pytest.approx(answers.count(most) / len(answers), abs=0.01)


def test_a_run_is_the_courses_fine_tune():
    sweep = stages.opened(plan_of(), "made")
    run = trial.run(sweep, "a", 1e-3, 1)
    done = train.fit(replace(VIT, learning_rate=1e-3, seed=1), device="cpu", progress=False)
    assert run.last_loss == round(done.losses[-1], 5)
    assert run.accuracy == train.evaluate(done.model, train.encoded(VIT)["test"], VIT)
    assert (run.arm, run.learning_rate, run.seed, run.steps) == ("a", 1e-3, 1, 3)


def test_a_run_that_diverges_counts_as_no_accuracy(monkeypatch):
    def diverge(*arguments, **settings):
        raise train.Diverged("The loss is nan.")

    monkeypatch.setattr(trial.train, "fit", diverge)
    run = trial.run(stages.opened(plan_of(), "made"), "a", 1e3, 0)
    assert (run.accuracy, run.validation, run.last_loss) == (0, 0, None)


def test_adapters_beside_query_and_value_are_those_of_the_recipe():
    parts = trial.splits(VIT, 30)
    extra = {"lora": {"targets": ["q_proj", "v_proj"], "rank": 8}}
    ours = trial.fit(VIT, parts.train, extra)
    own = train.fit(replace(VIT, lora_rank=8), parts.train, "cpu", progress=False)
    assert ours.losses == own.losses
    trained = [name for name, p in ours.model.named_parameters() if p.requires_grad]
    assert trained == [name for name, p in own.model.named_parameters() if p.requires_grad]
    everywhere = trial.fit(VIT, parts.train, {"lora": {"targets": ALL_LINEAR, "rank": 2}}).model
    adapted = {
        name.split(".lora_")[0] for name, _ in everywhere.named_parameters() if "lora_" in name
    }
    linear = [
        name
        for name, module in models.build(VIT).named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    ]
    assert adapted == set(linear)


def steps_of(optimizer, weight, gradients):
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def test_rounded_states_are_those_of_bitsandbytes_but_that_zero_stays_zero():
    """The library beside it where no gradient is zero; PyTorch's AdamW where nothing is rounded.

    A row without a second gradient has a first moment, and a second one that became zero.
    """
    bnb = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for rows in (64, 31):  # of 128 elements: the second tensor has fewer than 4,096
        start, *gradients = torch.randn(6, rows, 128, generator=generator)
        for make in (RoundedAdamW, bnb.optim.AdamW8bit, torch.optim.AdamW):
            weight = torch.nn.Parameter(start.clone())
            made = make([weight], lr=1e-2, weight_decay=0.1)
            moved[rows, make] = steps_of(made, weight, gradients) - start
    ours, library, whole = (moved[64, make] for make in dict.fromkeys(m for _, m in moved))
    off = (ours - whole).abs().mean()
    assert (ours - library).abs().mean() < off / 4 and off > 0.005 * whole.abs().mean()
    torch.testing.assert_close(moved[31, RoundedAdamW], moved[31, torch.optim.AdamW])

    first, longest = torch.ones(64, 128), {}
    first[1::2] = 1e-4  # of its block's largest: the square is below the lowest level
    for make in (RoundedAdamW, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.zeros(64, 128))
        optimizer = make([weight], lr=1e-2, weight_decay=0.0)
        before = steps_of(optimizer, weight, [first]).clone()
        after = steps_of(optimizer, weight, [torch.zeros(64, 128)])
        longest[make] = (after - before)[1].abs().max() / 1e-2
    assert longest[RoundedAdamW] > 100 and longest[torch.optim.AdamW] < 1


TEXT = Recipe(
    "deberta", data="r8", length=8, padding="dynamic", batch_size=4, train_size=24, steps=3
)


def test_an_order_of_documents_is_what_it_is_called():
    lengths = np.random.default_rng(0).integers(3, 200, 60).tolist()
    recipe = replace(TEXT, steps=10, seed=3)
    by_kind = {kind: orders.groups(kind, lengths, recipe) for kind in orders.KINDS}
    assert all([len(batch) for batch in batches] == [4] * 10 for batches in by_kind.values())
    rows = [train.rows_of_step(recipe, 60, step)[0] for step in range(10)]
    assert by_kind["random"] == rows
    flat = [document for batch in by_kind["sorted"] for document in batch]
    assert sorted(flat) == sorted(document for batch in rows for document in batch)
    tokens = [lengths[document] for document in flat]
    assert tokens == sorted(tokens)
    spread = {
        kind: np.mean([np.ptp([lengths[d] for d in batch]) for batch in batches])
        for kind, batches in by_kind.items()
    }
    assert max(spread["bucketed"], spread["Trainer"]) < spread["random"] / 2
    whole = orders.groups("Trainer", lengths, recipe, 15)
    assert sorted(sum(whole, [])) == list(range(60))
    assert max(lengths) in [lengths[document] for document in whole[0]]
    with pytest.raises(ValueError, match="no order 'longest': choose one of random"):
        orders.groups("longest", lengths, recipe)


def test_the_loop_with_a_given_order_is_the_courses_loop():
    split = train.encoded(TEXT)["train"]
    order = orders.groups("random", split.lengths.tolist(), TEXT)
    ours = orders.fit(TEXT, split, order)
    assert ours.losses == train.fit(TEXT, split, "cpu", progress=False).losses
    assert orders.fit(TEXT, split, order[::-1]).losses != ours.losses


@pytest.mark.parametrize("name", results.names())
def test_a_kept_sweep_is_the_one_that_is_planned(name):
    plan, kept = SWEEPS[name], results.read(name)
    assert (kept.base, kept.arms, kept.validation) == (plan.base, plan.arms, plan.validation)
    assert len(plan.seeds) >= 5


def test_a_kept_run_comes_out_again():
    """The head alone: cheap, and nearly convex, so that rounding does not grow from step to step.

    On the machine of the record it is equal to the last digit. Another processor adds in another
    order; two test images of 500 and a thousandth of the loss leave room for that, and are below
    what another seed changes (about four images, some hundredths of the loss).
    """
    kept = results.read("03_freezing")
    versions = torch.__version__, transformers.__version__
    if versions != (kept.environment["torch"], kept.environment["transformers"]):
        pytest.skip("The kept run was made with other versions of torch or transformers.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = kept.at("head only", kept.best("head only"))[0]
        again = trial.run(kept, run.arm, run.learning_rate, run.seed)
    finally:
        torch.set_num_threads(threads)
    assert again.accuracy == pytest.approx(run.accuracy, abs=0.0041)
    assert again.validation == pytest.approx(run.validation, abs=0.0041)
    assert again.last_loss == pytest.approx(run.last_loss, rel=1e-3)
