"""The kept searches of layouts: those of today, and in agreement with themselves."""

import json

import pytest

from benchmarks.torchtitan_steps import ROWS
from helpers import show
from helpers.plan import searches
from tight_fit.layouts.layout import parse
from tight_fit.search.space import TIE, Trial

KEPT = searches.kept()


@pytest.fixture(params=searches.JOBS)
def searched(request):
    return searches.JOBS[request.param], KEPT[request.param]


def test_every_job_is_kept():
    assert list(KEPT) == list(searches.JOBS)


def test_rates_are_those_of_the_seconds(searched):
    job, found = searched
    for row in [*found["rows"], found["published"]]:
        tokens = job.step.batch_size * searches.LENGTH
        rate = tokens / job.cluster.gpus / row["seconds"]
        assert row["tokens_per_second_per_gpu"] == pytest.approx(rate)


def test_what_is_shown_fits_and_the_best_is_within_a_tie_of_the_fastest(searched):
    job, found = searched
    rows = found["rows"]
    assert all(row["fits"] and row["need"] <= job.cluster.gpu.memory for row in rows)
    fastest = min(row["seconds"] for row in rows)
    assert rows[0]["seconds"] <= (1 + TIE) * fastest
    assert parse(rows[0]["layout"]).ranks == job.cluster.gpus
    assert rows[0]["layout"] in found["answer"]


def test_a_rank_holds_its_share_of_the_states(searched):
    """Weights and two states in fp32: 12 bytes per parameter, sharded by FSDP2 over data and
    context ranks, and cut over tensor ranks."""
    job, found = searched
    parameters = {"8B": 8.03e9, "70B": 70.55e9}[job.model]  # the Llama 3 paper's models
    for row in [*found["rows"], found["published"]]:
        layout = parse(row["layout"])
        if layout.strategy == "fsdp":
            shards = layout.data // layout.replicate * layout.context * layout.tensor
            assert row["need"] > 12 * parameters / shards


def test_the_table_marks_the_published_layout_once(searched):
    job, found = searched
    name = next(name for name, other in searches.JOBS.items() if other is job)
    table = show.large(name).frame
    marked = table[table["published"] != ""]
    assert list(marked["layout"]) == [found["published"]["layout"]]
    for measured in filter(None, job.measured):
        assert f"{measured:,}" in marked["published"].item()
    with pytest.raises(KeyError):
        show.large("8B on a phone")


def test_what_was_measured_is_that_of_the_page_of_accuracy():
    """On 8, 64 and 256 GPUs, each without torch.compile and with it."""
    measured = {(row.layout.ranks, row.compiled): row.tokens for row in ROWS if not row.float8}
    for job in searches.JOBS.values():
        ranks = job.cluster.gpus
        assert job.measured == (measured.get((ranks, False)), measured[ranks, True])


def test_the_kept_plans_are_todays():
    job, found = searches.JOBS["8B on 8"], KEPT["8B on 8"]
    best = found["rows"][0]
    trial = Trial(parse(best["layout"]), best["recompute"], best["micro_batches"])
    today = json.loads(json.dumps(searches.plan_one(job, trial)))
    assert today == best, "stale: python -m helpers.plan searches"
