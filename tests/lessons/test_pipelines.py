"""Lesson 15: what it says of GPipe's memory, by plan, and of libraries."""

from dataclasses import fields

import pytest
from accelerate.utils import MegatronLMPlugin

from helpers.parallel import Parallel
from helpers.recipe import Recipe
from helpers.strategy import plan_cache
from tests.lessons.cells import markdown_of


@pytest.mark.parametrize("precision, grows", [("bf16", True), ("fp32", False)])
def test_more_micro_batches_cost_gpipe_memory_only_under_autocast(precision, grows):
    assert "autocast makes 16-bit copies of the weights for each micro-batch" in markdown_of("15")
    layout = Parallel(pipeline=2, schedule="gpipe")
    job = {"profile": "mini", "weights": "random", "batch_size": 32, "precision": precision}
    few, many = (
        max(rank.peak for rank in plan_cache.make(Recipe("vit", accumulation=count, **job), layout))
        for count in (4, 16)
    )
    assert (many > 1.3 * few) == grows and many < (2 if grows else 1.1) * few


def test_accelerate_has_pipelines_by_megatron():
    assert "MegatronLMPlugin(pp_degree=4)" in markdown_of("15")
    assert "pp_degree" in {field.name for field in fields(MegatronLMPlugin)}
