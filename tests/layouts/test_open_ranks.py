"""Ranks that stay open: plans of further steps on them are those of ranks made anew."""

import pytest
import torch.distributed as dist
from transformers import BertConfig, LlamaConfig

from tests.layouts.compared import same
from tests.small import configured
from tight_fit.layouts import open_ranks, trace
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.open_ranks import OpenRanks
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep

pytestmark = pytest.mark.night
LLAMA = configured(LlamaConfig, 32, 6, 4, 48, 64, num_key_value_heads=2)
BERT = configured(BertConfig, 32, 2, 4, 48, 64)
FOUR = Cluster("H100", 4, inside="NVLink 4")


def planned(config, layout, number, recompute, ranks=None, **fields):
    fields = {"weights": "fp32", "precision": "bf16", "checkpointing": recompute != "none"} | fields
    step = ModelStep(config, batch_size=16, length=16, accumulation=number, **fields)
    return plan_step(step, parse(layout), selective=recompute == "selective", ranks=ranks)


@pytest.mark.parametrize(
    "config, layouts, fields, ranks_made",
    [
        (LLAMA, ["fsdp=4", "zero2=4", "fsdp=2,tensor=2"], {}, 2),  # fsdp and zero2 share a rank
        (LLAMA, ["hsdp=2x2", "zero1=4"], {"max_grad_norm": None}, 4),  # zero1 each time
        (LLAMA, ["fsdp=2,context=2"], {}, 6),  # two ranks are planned, in turn
        (BERT, ["zero2=4", "ddp=4"], {"precision": "fp16"}, 4),
    ],
)
def test_plans_on_open_ranks_are_those_of_new_ranks(
    config, layouts, fields, ranks_made, monkeypatch
):
    """In an order in which each differs from the one before in micro-batches and recomputation.
    Layouts on one grid send over the same axes: `same` compares the messages' axes, too."""
    steps = [(1, "none"), (2, "full"), (1, "selective")]
    asked = [(layout, *step) for step in steps for layout in layouts]
    anew = [planned(config, *one, **fields) for one in asked]
    made = []
    make = open_ranks.fake_rank
    monkeypatch.setattr(open_ranks, "fake_rank", lambda *given: made.append(1) or make(*given))
    with OpenRanks() as ranks:
        for one, new in zip(asked, anew):  # several layouts are open at once
            opened = planned(config, *one, ranks, **fields)
            assert same(opened, new), one
            assert facts_of(opened, FOUR) == facts_of(new, FOUR), one
        assert ranks and dist.is_initialized() and len(made) == ranks_made
        with pytest.raises(RuntimeError, match="is a rank already"):
            planned(config, *asked[0], **fields)
    assert not ranks and not dist.is_initialized()


@pytest.mark.parametrize(
    "layout, fields",
    [("fsdp=4", {"precision": "fp16"}), ("zero1=4", {}), ("fsdp=2,tensor=2", {})],
)
def test_what_stays_is_there_after_one_short_step(monkeypatch, layout, fields):
    """Two steps of two micro-batches each, and an update of all layers before, change nothing."""
    settle = trace.settle

    def long(rank, make_batch, count):
        trace.give_gradients(rank.module.parameters())
        rank.optimizer.step()
        rank.module.zero_grad(set_to_none=True)
        for _ in range(2):
            settle(rank, make_batch, 2)

    short = planned(LLAMA, layout, 2, "full", **fields)
    monkeypatch.setattr(trace, "settle", long)
    assert same(short, planned(LLAMA, layout, 2, "full", **fields))
    if layout == "fsdp=4":
        monkeypatch.setattr(trace, "settle", lambda rank, make_batch, count: None)
        assert not same(short, planned(LLAMA, layout, 2, "full", **fields))
