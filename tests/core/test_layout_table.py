"""The table of layouts: its figures are those of the planned candidates."""

import pytest
from transformers import LlamaConfig

from helpers import show
from helpers.parallel import Parallel
from helpers.recipe import Recipe, replace
from helpers.strategy.candidate import Candidate
from helpers.strategy.plan_cache import planned
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep
from tight_fit.units import size

JOB = Recipe("deberta", profile="mini", batch_size=8, length=32)
CLUSTER = Cluster("T4", per_machine=2)


def test_a_row_is_a_planned_candidate():
    two = Parallel(data=2)
    table = show.layouts(JOB, {"one": Parallel(), "two": two}, CLUSTER)
    candidate = Candidate(JOB, CLUSTER, planned(JOB, two))
    row = table.frame.iloc[1]
    assert list(table.frame["layout"]) == ["one", "two"]
    assert row["memory per GPU"] == size(candidate.peak) and row["fits"] == "yes"
    assert row["sent per GPU and step"] == size(sum(candidate.plan.bytes_by_collective.values()))
    assert row["examples per second"] == f"{8 / candidate.time.total:.0f}"
    assert table.frame.iloc[0]["sent per GPU and step"] == "nothing"


def test_a_layout_may_have_a_recipe_of_its_own():
    accumulated = replace(JOB, accumulation=4)
    table = show.layouts(JOB, {"whole": Parallel(), "cut": (Parallel(), accumulated)}, CLUSTER)
    expected = [size(planned(recipe).peak) for recipe in (JOB, accumulated)]
    assert list(table.frame["memory per GPU"]) == expected


def test_a_row_of_any_model_is_its_plan():
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    job = ModelStep(config, batch_size=4, length=16, weights="fp32", precision="fp16")
    table = show.layouts(job, {"one": parse("ddp=1"), "two": parse("fsdp=2")}, CLUSTER)
    one, two = table.frame.iloc
    facts = facts_of(plan_step(job, parse("fsdp=2")), CLUSTER)
    assert two["need per GPU"] == size(facts["need"]) and two["fits"] == "yes"
    assert two["sent per GPU and step"] == size(sum(facts["sent"]["data"].values()))
    assert two["tokens per second"] == f"{4 * 16 / facts['seconds']:,.0f}"
    assert one["sent per GPU and step"] == "nothing"
    assert "fp16 with loss scaling, fused AdamW, fused (sdpa) attention" in str(table)
    other = LlamaConfig(**config.to_dict() | {"num_hidden_layers": 4})
    again = show.layouts(replace(job, config=other), {"two": parse("fsdp=2")}, CLUSTER)
    assert again.frame.iloc[0]["sent per GPU and step"] != two["sent per GPU and step"]


def test_what_does_not_fit_says_by_how_much():
    large = Recipe("deberta", profile="mini", batch_size=4096, length=512)
    table = show.layouts(large, {"one": Parallel()}, Cluster("GTX 1650"))
    assert table.frame.iloc[0]["fits"].startswith("no, ") and "too much" in str(table)


def test_a_layout_that_the_cluster_cannot_have_is_refused():
    with pytest.raises(ValueError, match="more than one machine"):
        show.layouts(JOB, {"tensor": Parallel(tensor=4)}, CLUSTER)
