"""Published peaks of memory and layouts of torchtitan: the kept plans, and what is said of them."""

import pandas as pd
import pytest
import torch

from benchmarks import published_peaks, torchtitan_steps
from benchmarks.peaks import page, points, qwen_plans
from benchmarks.peaks.points import LEFT_OUT, POINTS
from benchmarks.peaks.qwen import LORA, PUBLISHED, QLORA, Qwen
from helpers import models
from helpers.plan import fake_batch, plan
from helpers.recipe import Recipe
from tests.night import few_by_day
from tight_fit.gpus import MARGIN
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues
from tools.course import readme

BY_NAME = {point.name: point for point in POINTS}
MISSES = points.misses()


def test_every_point_that_counts_has_a_kept_plan_and_every_figure_its_source():
    planned = points.read()
    assert planned.keys() <= BY_NAME.keys() and len(BY_NAME) == len(POINTS)
    assert not BY_NAME.keys() - planned.keys() - LEFT_OUT.keys()
    figures = sum(
        (point.allocated, point.reserved)[kind] is not None
        for point in POINTS
        for kind in (0, 1)
        if point.name in planned
    )
    assert len(MISSES) == figures and all(MISSES["source"])


def test_page_and_data_are_what_the_kept_plans_give():
    text = page.PAGE.read_text(encoding="utf8")
    assert text == page.with_kept(page.text(), text), "run `python -m benchmarks.peaks --page`"
    assert page.with_kept(page.text(), "") == page.text() != text
    for name, content in page.files().items():
        kept_data = (page.PAGE.parent / "data" / name).read_text(encoding="utf8")
        assert kept_data == content, f"{name}: run `python -m benchmarks.peaks --page`"
    rows = page.data()
    error = rows["planned_bytes"] / rows["measured_bytes"].astype(float) - 1
    assert error.map("{:+.4f}".format).equals(rows["error"])


def test_readme_says_the_same():
    allocated, reserved = (
        page.Errors.of(page.counted(kind)) for kind in (page.ALLOCATED, page.RESERVED)
    )
    said = (
        f"measured on GPUs by {allocated.mean:.1%} in the mean ({allocated.count} steps, "
        f"{allocated.worst:+.1%} at worst), the reserved by {reserved.mean:.1%} "
        f"({reserved.count}, {reserved.worst:+.1%})"
    )
    assert said in readme.README.read_text(encoding="utf8"), "run `make readme`"


def test_the_margin_is_what_the_reserved_peaks_ask_for():
    short, _ = page.shortfalls()
    assert page.margin() == MARGIN
    enough, less = ((short <= margin).mean() for margin in (MARGIN, MARGIN - 0.01))
    assert less < page.SUFFICES <= enough


def test_what_is_still_to_be_planned_has_its_source_and_counts_nowhere():
    waiting = page.to_plan()
    assert len(waiting) and waiting[["source", "licence"]].notna().all(axis=None)
    sizes = waiting["measured"] * waiting["unit"].map({"GB": 10**9, "GiB": 2**30})
    assert (sizes > 0).all()
    assert not set(sizes.round()) & set(MISSES["measured"].astype(float).round())


# Measured to the byte, with PyTorch's release and the script at hand.
EXACT = MISSES[MISSES["step"].isin([step.name for step in published_peaks.STEPS])]


@pytest.mark.parametrize(
    "kind, count, worst, mean", [("allocated", 9, 0.005, 0.002), ("reserved", 10, 0.03, 0.012)]
)
def test_steps_that_are_known_exactly_are_missed_by_little(kind, count, worst, mean):
    errors = EXACT[EXACT["peak"] == kind].set_index("step")["error"].abs()
    assert len(errors) == count and errors.max() < worst and errors.mean() < mean, errors


@pytest.mark.parametrize("step", few_by_day(published_peaks.STEPS), ids=lambda step: step.name)
def test_the_models_are_those_that_were_measured(step):
    with FakeTensorMode(allow_non_fake_inputs=True), FakeValues():
        model = step.setup()[0][0]
        count = sum(parameter.numel() for parameter in model.parameters())
    assert count == step.parameters


@pytest.mark.night
@pytest.mark.parametrize(
    "name",
    [
        "DistilBERT, 4 × 128",
        "ViT-B/16, 2 images",
        "BERT-base, fp16, 4 × 256, sdpa",
        "DistilBERT, fp16, 8 × 256, sdpa",  # measured on a Turing
        "GPT 124M, 8 × 1024, fused attention",
        "20 linear layers, DDP, after the first update",
        "RMSNorm, 2048 × 32768",
        "ViT-L/16, 64 images, fp16 autocast",
    ],
)
def test_kept_plans_are_todays(name):
    peaks = BY_NAME[name].planned()
    assert points.read()[name] == {"allocated": peaks.allocated, "reserved": peaks.reserved}


@pytest.mark.night
def test_the_lab_s_table_says_it():
    step = BY_NAME["DeBERTa-v3-base, 2 × 16"]
    planned, peaks = published_peaks.allocator_peaks(step)
    assert -0.04 < planned.peak / step.allocated - 1 < 0, "without workspace and blocks it is short"
    (row,) = published_peaks.table([(step, planned, peaks)]).frame.to_dict("records")
    assert row["reserved, planned"].endswith("(+0.00%)") and row["torch-preflight"] == "-"


# -- Qwen-7B ---------------------------------------------------------------------------------------


def test_every_published_step_of_qwen_is_in_the_data():
    """None is left out for its error, and what is shown for the context is said."""
    shown = qwen_plans.table()
    assert list(shown["Qwen-7B"]) == [row.name for row in PUBLISHED] == list(qwen_plans.read())
    assert list(shown["nvidia-smi"]) == [f"{row.memory} GB" for row in PUBLISHED]
    assert "500.0 MiB for the CUDA context" in page.text() and len(PUBLISHED) == 9


def test_qwens_set_up_has_the_published_sizes():
    """7.7 billion weights, adapters of 143 million, and half a byte for each quantized weight."""
    with torch.device("meta"):
        plain, quantized = (Qwen(way, layers=1) for way in (LORA, QLORA))
    count = {name: part.numel() for name, part in plain.named_parameters()}
    layer = sum(number for name, number in count.items() if name.startswith("h.0."))
    adapters = sum(number for name, number in count.items() if "lora_" in name)
    assert 32 * (layer - adapters) + 2 * 151_936 * 4096 + 4096 == 7_721_324_544
    assert 32 * adapters == 143_130_624
    packed = sum(part.nbytes for name, part in quantized.named_buffers() if "qweight" in name)
    assert packed == (4096 * 3 * 4096 + 4096 * 4096 + 3 * 4096 * 11_008) / 2


# -- torchtitan ------------------------------------------------------------------------------------


def test_every_row_of_torchtitan_has_a_kept_plan_and_a_source():
    assert torchtitan_steps.read().keys() == {row.key for row in torchtitan_steps.ROWS}
    assert len(torchtitan_steps.ROWS) == len(torchtitan_steps.table()) == 10
    for row in torchtitan_steps.ROWS:
        assert row.source.startswith("https://") and row.layout.ranks % 8 == 0


@pytest.mark.parametrize("kind", torchtitan_steps.KINDS[:2])
def test_rows_that_are_planned_as_measured_are_missed_by_no_more_than_was_aimed_at(kind):
    found = torchtitan_steps.errors().query("kind == @kind")
    assert len(found) >= 2 and found["reserved"].notna().all()
    assert found["reserved"].abs().mean() < 0.10 and found["tokens"].abs().mean() < 0.20


def test_an_error_is_that_of_its_row(monkeypatch):
    row = torchtitan_steps.ROWS[0]
    plans = {row.key: {"reserved": 2 * row.memory, "tokens": row.tokens / 2}}
    monkeypatch.setattr(torchtitan_steps, "ROWS", (row,))
    monkeypatch.setattr(torchtitan_steps, "read", lambda: plans)
    expected = pd.DataFrame([{"kind": row.kind, "reserved": 1.0, "tokens": -0.5}])
    pd.testing.assert_frame_equal(torchtitan_steps.errors(), expected)


@pytest.mark.night
def test_a_kept_plan_of_torchtitan_is_todays():
    row = torchtitan_steps.ROWS[0]
    assert row.planned() == pytest.approx(torchtitan_steps.read()[row.key], rel=1e-3)


# -- steps of one's own ----------------------------------------------------------------------------


def test_the_courses_step_planned_as_ones_own():
    recipe = Recipe(batch_size=8, length=32, accumulation=2)

    def setup():
        model = models.empty(recipe)
        optimizer = make_optimizer(model, recipe)

        def batches():
            for _ in range(recipe.accumulation):
                yield fake_batch(model, recipe)

        return [model], lambda: train_step(model, optimizer, batches(), recipe.batch_size, recipe)

    own, made = plan_custom_step(setup), plan(recipe)
    assert own.peak == pytest.approx(made.peak, rel=0.01)  # which counts blocks of 512 bytes
    peaks = [planned.allocator_peaks("T4").allocated for planned in (own, made)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def own_step(keep: bool):
    def setup():
        model = torch.nn.Linear(1000, 1000)
        torch.nn.init.trunc_normal_(model.weight)  # draws until all is within bounds
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
        batch = torch.zeros(3000, 1000)

        def step():
            optimizer.zero_grad(set_to_none=not keep)
            model(batch).square().mean().backward()
            optimizer.step()

        return [model, batch], step

    return setup


def test_gradients_that_are_kept_are_seen():
    """1,001,000 gradients of four bytes lie beside everything else, from the second step on."""
    kept, given_up = own_step(keep=True), own_step(keep=False)
    assert plan_custom_step(kept).peak - plan_custom_step(given_up).peak == 4 * 1_001_000
    assert plan_custom_step(kept, steps=1).peak == plan_custom_step(given_up, steps=1).peak
