"""The table of layouts: its figures are those of the plans."""

import pytest
from transformers import LlamaConfig

from helpers import show
from helpers.recipe import Recipe
from tests.small import configured
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep
from tight_fit.units import size

CLUSTER = Cluster("T4", per_machine=2)
ONE, TWO = parse("ddp=1"), parse("fsdp=2")


def small(layers=2, **fields) -> ModelStep:
    config = configured(LlamaConfig, 32, layers, 4, 72, 96, num_key_value_heads=2)
    usual = {"batch_size": 4, "length": 16, "weights": "fp32", "precision": "fp16"}
    return ModelStep(config, **usual | fields)


def test_a_layout_may_have_a_step_of_its_own():
    accumulated = small(accumulation=4)
    table = show.layouts(small(), {"whole": ONE, "cut": (ONE, accumulated)}, CLUSTER)
    expected = [facts_of(plan_step(step, ONE), CLUSTER) for step in (small(), accumulated)]
    assert list(table.frame["need per GPU"]) == [size(facts["need"]) for facts in expected]
    assert table.caption.endswith(", not compiled.")  # which describes both rows
    table = show.layouts(small(precision="fp32"), {"whole": ONE, "half": (ONE, small())}, CLUSTER)
    assert "computed in fp32 without TF32" in table.caption
    assert table.caption.endswith("; half: computed in fp16 with loss scaling.")


def test_a_row_of_any_model_is_its_plan():
    table = show.layouts(small(), {"one": ONE, "two": TWO}, CLUSTER)
    one, two = table.frame.iloc
    facts = facts_of(plan_step(small(), TWO), CLUSTER)
    assert two["need per GPU"] == size(facts["need"]) and two["fits"] == "yes"
    assert two["sent per GPU and step"] == size(sum(facts["sent"]["data"].values()))
    assert two["tokens per second"] == f"{4 * 16 / facts['seconds']:,.0f}"
    assert one["sent per GPU and step"] == "nothing"
    assert "fp16 with loss scaling, fused AdamW, fused (sdpa) attention" in str(table)
    again = show.layouts(small(layers=4), {"two": TWO}, CLUSTER)
    assert again.frame.iloc[0]["sent per GPU and step"] != two["sent per GPU and step"]
    large = small(batch_size=2**16, length=512)
    table = show.layouts(large, {"one": ONE}, Cluster("GTX 1650"))
    assert table.frame.iloc[0]["fits"].startswith("no, ") and "too much" in str(table)
    with pytest.raises(TypeError, match="job must be of type ModelStep"):
        show.layouts(Recipe(), {"one": ONE}, CLUSTER)
