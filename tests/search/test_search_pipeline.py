"""The search of a layout where there are pipelines: its bounds, its ranking, its words."""

import json

import pytest
from transformers import LlamaConfig

from tests.night import few_by_day
from tests.search.test_search import below
from tests.small import configured
from tight_fit.command.main import main
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout
from tight_fit.models.step import ModelStep
from tight_fit.search.layouts import Searched, family_of, search_layouts
from tight_fit.search.space import RECOMPUTED, Trial, accumulations, layouts_of

CONFIG = configured(LlamaConfig, 64, 2, 4, 176, 512, num_key_value_heads=2)
# 3.5 G parameters, too many for one GPU; few layers, so that a plan takes seconds.
WIDE = configured(LlamaConfig, 8192, 4, 64, 28672, 512, num_key_value_heads=8)
SLOW = Cluster("A100-40GB", 2, 2, "PCIe 3 x16", "Ethernet 1 Gbit")
PIPELINE = Layout(2, pipeline=2)


def job(config=CONFIG, **fields) -> ModelStep:
    usual = {"batch_size": 8, "length": 256, "weights": "fp32", "precision": "bf16"}
    return ModelStep(config, **usual | fields)


def test_a_pipeline_has_a_stage_in_each_machine():
    assert layouts_of(SLOW)[-1] == PIPELINE
    assert layouts_of(Cluster("T4", 1, 4))[-1] == Layout(1, "ddp", pipeline=4)
    assert all(layout.pipeline == 1 for layout in layouts_of(Cluster("T4", 8)))
    of = job(batch_size=48)
    assert accumulations(PIPELINE, of, 4, None) == [2, 3, 4, 6, 8]  # of 24, up to 4 per stage
    assert accumulations(PIPELINE, of, 4, 1) == [] and accumulations(PIPELINE, of, 4, 2) == [2]


def test_more_micro_batches_may_make_a_pipeline_faster():
    few, many = (Trial(PIPELINE, "none", number) for number in (2, 4))
    assert not many.adds_work_to(few) and family_of(many) != family_of(few)
    assert Trial(PIPELINE, "full", 2).adds_work_to(few)
    assert few.axes == 2
    one, two = (Trial(Layout(4), "none", number) for number in (1, 2))
    assert two.adds_work_to(one) and family_of(two) == family_of(one)


@pytest.mark.parametrize(
    "layout, length, width",
    few_by_day(
        [
            (PIPELINE, 256, 64),
            (PIPELINE, 512, 1024),
            (Layout(1, "ddp", pipeline=4), 512, 512),
            (Layout(4, "ddp", pipeline=2), 64, 1024),
        ]
    ),
    ids=str,
)
def test_bounds_are_below_what_is_planned(layout, length, width):
    """Where work is most of a step and where weights are most of its memory."""
    wide = configured(LlamaConfig, width, 4, 4, 11 * width // 4, 512, num_key_value_heads=2)
    of, cluster = job(wide, length=length), Cluster("A100-40GB", 2, layout.ranks // 2)
    first = slice(0, None, 2)
    for recompute in ("none", "full"):
        assert below(of, cluster, [layout], recompute, first)


def test_what_cannot_be_cut_is_left_out_with_its_reason():
    odd = LlamaConfig(**CONFIG.to_dict() | {"num_hidden_layers": 3})
    found = search_layouts(job(odd, batch_size=4), SLOW, ("none",), 2)
    assert "cannot be divided evenly over 2 stages" in found.left_out["pipeline=2,fsdp=2"]
    found = search_layouts(job(batch_size=8), SLOW, ("none",), 1)
    assert "A pipeline takes 2 to 8 micro-batches" in found.left_out["pipeline=2,fsdp=2"]
    assert isinstance(found, Searched) and found.best
    found = search_layouts(job(batch_size=8), SLOW, ("none",), 2)
    assert "pipeline=2,fsdp=2" not in found.left_out


def test_the_command_says_what_a_pipeline_waits_for(tmp_path, capsys):
    path = tmp_path / "config.json"
    values = WIDE.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    path.write_text(json.dumps(values))
    words = [str(path), "--gpu", "A100-40GB", "--batch", "8", "--length", "256", "--gpus", "4"]
    words += ["--machines", "2", "--inside", "PCIe 3 x16", "--between", "Ethernet 1 Gbit"]
    words += ["--accumulation", "2", "--recompute", RECOMPUTED[1], "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["winner"]["layout"] == "pipeline=2,fsdp=2"
    assert "--layout pipeline=2,fsdp=2" in facts["winner"]["command"]
    assert facts["winner"]["seconds_of_bubble"] > 0
