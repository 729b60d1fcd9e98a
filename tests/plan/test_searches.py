"""The kept searches of layouts: those of today, and in agreement with themselves."""

import json
import re
import shlex

import pytest

from benchmarks import layout_searches
from benchmarks.torchtitan_steps import ROWS
from helpers import show
from tests.lessons.cells import markdown_of
from tight_fit.command.main import main
from tight_fit.layouts.layout import parse
from tight_fit.search.space import TIE, Trial

KEPT = layout_searches.kept_searches()
ALL = layout_searches.JOBS | layout_searches.OWNED
# In billions: the Llama 3 paper's models, and those of the cards of Qwen3-0.6B and TinyLlama.
PARAMETERS = {"70B": 70.55, layout_searches.LLAMA_8B: 8.03}
PARAMETERS |= {"Qwen/Qwen3-0.6B": 0.596, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.1}


@pytest.fixture(params=ALL)
def searched(request):
    return ALL[request.param], KEPT[request.param]


@pytest.fixture(params=layout_searches.JOBS)
def published(request):
    return layout_searches.JOBS[request.param], KEPT[request.param]


class Asked(Exception):
    """Ends a command once it has said what it would search."""


def rows_of(found):
    return [*found["rows"], *filter(None, [found["published"]])]


def test_every_job_is_kept():
    assert list(KEPT) == list(ALL)


def test_rates_are_those_of_the_seconds(searched):
    job, found = searched
    for row in rows_of(found):
        tokens = job.step.batch_size * job.step.tokens
        rate = tokens / parse(row["layout"]).ranks / row["seconds"]
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
    parameters = PARAMETERS[job.model] * 1e9
    for row in rows_of(found):
        layout = parse(row["layout"])
        if layout.strategy == "fsdp":
            shards = layout.data // layout.replicate * layout.context * layout.tensor
            assert row["need"] > 12 * parameters / shards / layout.pipeline


def test_one_gpu_is_named_only_where_it_can_hold_the_model(searched):
    """AdamW on all weights in fp32 takes 16 bytes per parameter."""
    job, found = searched
    least = 16e9 * PARAMETERS[job.model] if job.step.lora_rank is None else 0.0
    assert found["alone"] is None or least < job.cluster.gpu.memory
    assert found["alone"] is None or found["alone"] > found["rows"][0]["seconds"]


def test_the_slow_link_takes_what_the_hand_estimate_of_lesson_18_says():
    """FSDP sends 8 bytes per parameter; over Ethernet nearly all of the step is waiting."""
    job, found = layout_searches.OWNED["16 A100, Ethernet"], KEPT["16 A100, Ethernet"]
    (row,) = [row for row in found["rows"] if row["layout"] == "fsdp=16"]
    sent = 8 * 8.03e9 * 15 / 16
    assert row["seconds"] == pytest.approx(sent / job.cluster.between.speed, rel=0.1)


def test_the_plan_over_infiniband_reaches_the_share_that_lesson_18_says():
    (best, *_) = KEPT["16 A100, InfiniBand"]["rows"]
    flops = 6 * 8.03e9 * best["tokens_per_second_per_gpu"]
    assert f"reaches {flops / 312e12:.2f}." in markdown_of("18")  # of an A100's peak in bf16


def test_the_command_of_the_first_screen_is_the_search_that_the_lesson_shows(monkeypatch):
    asked = {}

    def instead(job, cluster, *rest):
        asked.update(job=job, cluster=cluster)
        raise Asked

    (line,) = re.findall(r"^tight-fit (.*)$", markdown_of("18"), re.MULTILINE)
    monkeypatch.setattr("tight_fit.search.layouts.search_layouts", instead)
    monkeypatch.setattr("sys.argv", ["tight-fit", *shlex.split(line)])
    with pytest.raises(Asked):
        main()
    kept = layout_searches.JOBS["8B on 8"]
    assert asked["job"] == kept.step and str(asked["cluster"]) == str(kept.cluster)
    assert asked["job"].config.hidden_size == kept.step.config.hidden_size


def test_the_table_marks_the_published_layout_once(published):
    job, found = published
    name = next(name for name, other in layout_searches.JOBS.items() if other is job)
    table = show.large(name).frame
    marked = table[table["published"] != ""]
    assert list(marked["layout"]) == [found["published"]["layout"]]
    for measured in filter(None, job.measured):
        assert f"{measured:,}" in marked["published"].item()
    with pytest.raises(KeyError):
        show.large("8B on a phone")


def test_a_job_that_nobody_published_has_no_such_column():
    table = show.large("16 A100, InfiniBand", most=3).frame
    assert "published" not in table and len(table) == 3


def test_the_table_of_owned_gpus_has_a_row_for_each():
    table = show.owned().frame
    assert list(table["GPUs"]) == list(layout_searches.OWNED)
    assert list(table["layout"]) == [
        KEPT[name]["rows"][0]["layout"] for name in layout_searches.OWNED
    ]


def test_what_was_measured_is_that_of_the_page_of_accuracy():
    """On 8, 64 and 256 GPUs, each without torch.compile and with it."""
    measured = {(row.layout.ranks, row.compiled): row.tokens for row in ROWS if not row.float8}
    for job in layout_searches.JOBS.values():
        ranks = job.cluster.gpus
        assert job.measured == (measured.get((ranks, False)), measured[ranks, True])


def test_the_kept_plans_are_todays():
    job, found = layout_searches.JOBS["8B on 8"], KEPT["8B on 8"]
    best = found["rows"][0]
    trial = Trial(parse(best["layout"]), best["recompute"], best["micro_batches"])
    today = json.loads(json.dumps(layout_searches.plan_trial(job, trial)))
    assert today == best, "stale: make plans"
