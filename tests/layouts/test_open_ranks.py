"""Ranks that stay open: plans of further steps on them are those of ranks made anew."""

import pytest
import torch.distributed as dist
from transformers import BertConfig, LlamaConfig

from tests.layouts.few_layers import same
from tests.small import configured
from tight_fit.layouts import open_ranks
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.open_ranks import OpenRanks
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep

MODELS = {
    "llama": configured(LlamaConfig, 32, 6, 4, 48, 64, num_key_value_heads=2),
    "bert": configured(BertConfig, 32, 2, 4, 48, 64),
}
FOUR = Cluster("H100", 4, inside="NVLink 4")
# (micro-batches, recomputation) in an order in which each differs from the one before
STEPS = [(1, "none"), (2, "full"), (1, "selective"), (1, "full"), (4, "none")]


def planned(model, layout, number, recompute, ranks=None, all_layers=False, **fields):
    step = ModelStep(
        MODELS[model],
        batch_size=16,
        length=16,
        accumulation=number,
        checkpointing=recompute != "none",
        **{"weights": "fp32", "precision": "bf16"} | fields,
    )
    selective = recompute == "selective"
    return plan_step(step, parse(layout), selective=selective, all_layers=all_layers, ranks=ranks)


@pytest.mark.parametrize(
    "model, layouts, fields",
    [
        ("llama", ["fsdp=4", "zero2=4", "fsdp=2,tensor=2"], {}),
        ("llama", ["zero2=4", "fsdp=4"], {"max_grad_norm": None}),
        ("llama", ["fsdp=2,context=2", "hsdp=2x2", "zero1=4"], {}),
        ("bert", ["fsdp=4", "ddp=4"], {"precision": "fp16"}),
    ],
)
def test_plans_on_open_ranks_are_those_of_new_ranks(model, layouts, fields):
    asked = [(layout, *step) for step in STEPS for layout in layouts]
    anew = [planned(model, *one, **fields) for one in asked]
    with OpenRanks() as ranks:
        for one, new in zip(asked, anew):  # several layouts are open at once
            opened = planned(model, *one, ranks, **fields)
            assert same(opened, new), one
            assert facts_of(opened, FOUR) == facts_of(new, FOUR), one
        assert ranks and dist.is_initialized()
        with pytest.raises(RuntimeError, match="is a rank already"):
            planned(model, *asked[0], **fields)
    assert not ranks and not dist.is_initialized()


@pytest.mark.parametrize("layout", ["hsdp=2x2", "fsdp=2,tensor=2"])
def test_ranks_on_one_grid_send_over_the_same_axes(layout):
    with OpenRanks() as ranks:
        few, every = (
            planned("llama", layout, 1, "full", ranks, all_layers) for all_layers in (False, True)
        )
    assert {message.axis for message in every.sent} <= {"data", "replicate", "tensor"}
    assert same(few, every)


def test_a_rank_is_made_once_for_steps_that_only_vary(monkeypatch):
    made = []
    make = open_ranks.fake_rank
    monkeypatch.setattr(open_ranks, "fake_rank", lambda *given: made.append(1) or make(*given))
    with OpenRanks() as ranks:
        for number, recompute in STEPS:
            planned("llama", "fsdp=4", number, recompute, ranks)
            planned("llama", "zero2=4", number, recompute, ranks)
        assert len(made) == 1, "FSDP2 only drops gathered weights at another moment"
        planned("llama", "fsdp=4", 1, "none", ranks, max_grad_norm=None)
        planned("llama", "zero1=4", 2, "none", ranks)
        planned("llama", "zero1=4", 2, "none", ranks)
    assert len(made) == 4, "another step, and a stage that keeps gradients of its micro-batches"
