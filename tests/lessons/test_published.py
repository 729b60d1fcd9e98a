"""Lessons 18, 22 and 27: what they say of torchtitan's measurements is what benchmarks/ keeps."""

import csv

import pytest

from benchmarks import layout_searches
from benchmarks.torchtitan_steps import CARD, ROWS
from tests.lessons.cells import markdown_of
from tight_fit.command import notes
from tight_fit.models.config import read
from tight_fit.models.step import ModelStep
from tight_fit.units import GIB, size
from tools.course import ROOT


@pytest.fixture(scope="module")
def eight():
    """{whether compiled: the row} of Llama 3.1 8B on eight GPUs."""
    return {row.compiled: row for row in ROWS if row.layout.ranks == 8 and not row.float8}


def test_lesson_18_says_that_the_published_layout_is_too_tight_for_80_gb(eight):
    text = markdown_of("18")
    job = layout_searches.JOBS["8B on 8"]
    best = layout_searches.kept_searches()["8B on 8"]["rows"][0]
    room, need = job.cluster.gpu.memory, best["need"]
    assert best["layout"] == "fsdp=8" and room - need < GIB / 2  # a hair's breadth
    assert eight[False].memory * GIB > room  # what was measured does not fit it
    assert f"{need / GIB:.2f} of the {size(room)} of an H100" in text
    assert f"reserved {eight[False].memory} GiB there" in text and "96 GB" in CARD.name
    rate = best["tokens_per_second_per_gpu"]
    assert f"{rate:,.0f} tokens per second where {eight[False].tokens:,} were measured" in text
    with (ROOT / "docs" / "data" / "torchtitan.csv").open(encoding="utf8") as file:
        row = next(csv.DictReader(file))  # with the memory and the attention of those GPUs
    assert row["tokens/s per GPU measured"] == str(eight[False].tokens)
    assert f"{int(row['tokens/s per GPU planned']):,} are planned" in text


@pytest.mark.parametrize(
    "lesson, compiled, count, says, step",
    [
        ("22", "yes", 2, "took {list} % longer than so planned", {"compile": True}),
        ("27", "with float8", 3, "took {least} to {most} % longer", {"float8": "tensorwise"}),
    ],
)
def test_a_lesson_and_the_answer_say_how_far_compiled_plans_were_off(
    lesson, compiled, count, says, step
):
    """Of the rows of FSDP alone, as docs/data/torchtitan.csv has them."""
    with (ROOT / "docs" / "data" / "torchtitan.csv").open(encoding="utf8") as file:
        rows = [row for row in csv.DictReader(file) if row["torch.compile"] == compiled]
    off = [row for row in rows if "," not in row["layout"]]
    assert len(off) == count and all(abs(float(row["GiB off"].strip("+%"))) < 1 for row in off)
    times = [round(float(row["tokens/s off"].strip("+%"))) for row in off]
    listed = " and ".join(", ".join(map(str, times)).rsplit(", ", 1))
    said = says.format(list=listed, least=min(times), most=max(times))
    assert said in markdown_of(lesson)
    planned = ModelStep(read("meta-llama/Llama-3.1-8B"), **{"compile": True} | step)
    assert any(f"took {listed} % more time" in note for note in notes.of_step(planned, None))


def test_lesson_22_says_on_which_gpus_compiling_was_measured(eight):
    text = markdown_of("22")
    eager, compiled = eight[False], eight[True]
    assert f"{compiled.tokens:,} instead of {eager.tokens:,} tokens per second and GPU" in text
    assert f"in {compiled.memory} instead of {eager.memory} GiB" in text
    assert "H100s of 96 GB and 500 W" in text and "96 GB" in CARD.name
