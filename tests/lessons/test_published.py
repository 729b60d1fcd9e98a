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

TABLE = ROOT / "docs" / "data" / "torchtitan.csv"
MEASURED = [*csv.DictReader(TABLE.read_text(encoding="utf8").splitlines())]


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
    row = MEASURED[0]  # with the memory and the attention of those GPUs
    assert row["tokens/s per GPU measured"] == str(eight[False].tokens)
    assert f"{int(row['tokens/s per GPU planned']):,} are planned" in text


def test_lesson_22_says_on_which_gpus_compiling_was_measured(eight):
    text = markdown_of("22")
    eager, compiled = eight[False], eight[True]
    assert f"{compiled.tokens:,} instead of {eager.tokens:,} tokens per second and GPU" in text
    assert f"in {compiled.memory} instead of {eager.memory} GiB" in text
    assert "H100s of 96 GB and 500 W" in text and "96 GB" in CARD.name


def off(compiled, most):
    """How many percent longer steps of FSDP alone took than planned, as the table has them.

    Their memory was off by less than `most` %.
    """
    rows = [
        row for row in MEASURED if row["torch.compile"] == compiled and "," not in row["layout"]
    ]
    assert rows and all(abs(float(row["GiB off"].strip("+%"))) < most for row in rows)
    return [round(float(row["tokens/s off"].strip("+%"))) for row in rows]


def test_lesson_27_and_the_answer_say_how_far_compiled_plans_with_float8_were_off():
    errors = off("with float8", 1)
    step = ModelStep(read("meta-llama/Llama-3.1-8B"), compile=True, float8="tensorwise")
    first, second, third = errors
    times = f"{first}, {second} and {third}"
    assert any(f"took {times} % more time" in note for note in notes.of_step(step, None))
    assert f"took {min(errors)} to {max(errors)} % longer" in markdown_of("27")


def test_lesson_22_and_the_answer_say_how_far_compiled_plans_were_off():
    first, second = off("yes", 0.6)
    times = f"{first} and {second}"
    assert f"took {times} % longer than so planned" in markdown_of("22")
    step = ModelStep(read("openai-community/gpt2"), compile=True)
    assert any(f"took {times} % more time" in note for note in notes.of_step(step, None))
