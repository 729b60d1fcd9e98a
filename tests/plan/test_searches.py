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

JOBS, OWNED = layout_searches.JOBS, layout_searches.OWNED
KEPT = layout_searches.kept_searches()
# In billions: the Llama 3 paper's models, and those of the cards of Qwen3-0.6B and TinyLlama.
PARAMETERS = {"70B": 70.55, layout_searches.LLAMA_8B: 8.03}
PARAMETERS |= {"Qwen/Qwen3-0.6B": 0.596, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.1}


class Asked(Exception):
    """Ends a command once it has said what it would search."""


@pytest.mark.parametrize("name", KEPT)
def test_a_search_agrees_with_itself(name):
    """Rates are those of the seconds, all that is shown fits, and the best is within a tie of the
    fastest. Of weights and two states in fp32, 12 bytes per parameter, or of weights in 4 bits, a
    rank holds its share: sharded by FSDP2 over data and context ranks, cut over tensor ranks."""
    assert list(KEPT) == list(JOBS | OWNED)
    job, found = (JOBS | OWNED)[name], KEPT[name]
    rows, parameters = found["rows"], PARAMETERS[job.model] * 1e9
    held = (0.5 if job.step.base == "nf4" else 12) * parameters
    for row in [*rows, *filter(None, [found["published"]])]:
        layout = parse(row["layout"])
        rate = job.step.batch_size * job.step.tokens / layout.ranks / row["seconds"]
        assert row["tokens_per_second_per_gpu"] == pytest.approx(rate)
        if layout.strategy == "fsdp":
            shards = layout.data // layout.replicate * layout.context * layout.tensor
            assert row["need"] > held / shards / layout.pipeline
    assert all(row["fits"] and row["need"] <= job.cluster.gpu.memory for row in rows)
    assert rows[0]["seconds"] <= (1 + TIE) * min(row["seconds"] for row in rows)
    assert parse(rows[0]["layout"]).ranks == job.cluster.gpus
    assert rows[0]["layout"] in found["answer"]
    if found["alone"] is not None:  # one GPU is named: it can hold what AdamW trains in fp32
        assert job.step.lora_rank or 16 * parameters < job.cluster.gpu.memory
        assert found["alone"] > rows[0]["seconds"]


def test_links_take_what_lesson_18_says():
    """FSDP sends 8 bytes per parameter; over Ethernet nearly all of the step is waiting."""
    job, found = OWNED["16 A100, Ethernet"], KEPT["16 A100, Ethernet"]
    (row,) = [row for row in found["rows"] if row["layout"] == "fsdp=16"]
    sent = 8 * 8.03e9 * 15 / 16
    assert row["seconds"] == pytest.approx(sent / job.cluster.between.speed, rel=0.1)
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
    kept = JOBS["8B on 8"]
    assert asked["job"] == kept.step and str(asked["cluster"]) == str(kept.cluster)
    assert asked["job"].config.hidden_size == kept.step.config.hidden_size


def test_tables_mark_the_published_layout_once_and_what_was_measured_is_that_of_the_page():
    """On 8, 64 and 256 GPUs, each without torch.compile and with it."""
    measured = {(row.layout.ranks, row.compiled): row.tokens for row in ROWS if not row.float8}
    for name, job in JOBS.items():
        table = show.large(name).frame
        marked = table[table["published"] != ""]
        assert list(marked["layout"]) == [KEPT[name]["published"]["layout"]]
        for tokens in filter(None, job.measured):
            assert f"{tokens:,}" in marked["published"].item()
        ranks = job.cluster.gpus
        assert job.measured == (measured.get((ranks, False)), measured[ranks, True])
    with pytest.raises(KeyError):
        show.large("8B on a phone")
    table = show.large("16 A100, InfiniBand", most=3).frame  # a job that nobody published
    assert "published" not in table and len(table) == 3
    table = show.owned().frame
    assert list(table["GPUs"]) == list(OWNED)
    assert list(table["layout"]) == [KEPT[name]["rows"][0]["layout"] for name in OWNED]


def test_the_kept_plans_are_todays():
    job, best = JOBS["8B on 8"], KEPT["8B on 8"]["rows"][0]
    trial = Trial(parse(best["layout"]), best["recompute"], best["micro_batches"])
    today = json.loads(json.dumps(layout_searches.plan_trial(job, trial)))
    assert today == best, "stale: make plans"
