"""The model of a step's time: links by hand, and planned layouts."""

import sys

import pytest
import torch.distributed as dist
from transformers import LlamaConfig

from tests.small import configured
from tight_fit.gpus.specs import find_gpu
from tight_fit.layouts.clocks import events_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.plan import plan_step
from tight_fit.layouts.seconds import BEGIN, LINKS, Link, transfer
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model_step

CONFIG = configured(LlamaConfig, 64, 4, 4, 128, 96, num_key_value_heads=2)
STEP = ModelStep(CONFIG, batch_size=16, length=64, accumulation=4, weights="fp32")
DDP = parse("ddp=2")
LAYOUTS = (DDP, *map(parse, ("fsdp=2", "tensor=2", "pipeline=2")))


@pytest.fixture(scope="module")
def laid():
    return {layout: plan_step(STEP, layout) for layout in LAYOUTS}


def test_time_of_a_collective():
    """By hand: an all-reduce of 4 MB over four ranks sends 6 MB each, up and down a tree."""
    message = SentMessage("all_reduce", payload=4_000_000, ranks=4, axis="data", phase="backward")
    assert transfer(message, Link("slow", 1e6, 0.5)) == pytest.approx(BEGIN + 2 * 2 * 0.5 + 6)
    gather = SentMessage("all_gather", payload=4_000_000, ranks=4, axis="data", phase="forward")
    assert transfer(gather, Link("slow", 1e6, 0.5)) == pytest.approx(BEGIN + 3 * 0.5 + 3)
    send = SentMessage("send", payload=4_000_000, ranks=4, axis="pipeline", phase="forward")
    assert transfer(send, Link("slow", 1e6, 0.5)) == pytest.approx(BEGIN + 0.5 + 4)


def test_published_latencies_and_speeds_of_nccl():
    """Those that the comment on `LINKS` names, to a quarter (latencies) and a tenth (speeds)."""

    def small(ranks, link):
        return transfer(SentMessage("all_reduce", 8, ranks, "data", ""), LINKS[link])

    for ranks, link, seconds in (
        (2, "NVLink 3", 12e-6),
        (8, "NVLink 4", 18e-6),
        (8, "PCIe 4 x16", 42e-6),
        (2, "InfiniBand 200 Gbit", 30e-6),
    ):
        assert small(ranks, link) == pytest.approx(seconds, rel=0.25), link
    assert LINKS["NVLink 4"].speed == pytest.approx(370e9, rel=0.1)
    assert LINKS["NVLink 3"].speed == pytest.approx(208e9, rel=0.12)
    assert 4 * LINKS["InfiniBand 200 Gbit"].speed == pytest.approx(96e9, rel=0.1)
    assert all(link.speed > 0 < link.latency for link in LINKS.values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_trace_holds_every_message_that_is_sent(laid, layout):
    def counted(messages):
        names = ("kind", "payload", "ranks", "axis")
        return sorted(tuple(getattr(sent, name) for name in names) for sent in messages)

    for rank in laid[layout].ranks:
        events = events_of(rank.operations, find_gpu("T4"))
        assert rank.sent
        assert counted(rank.sent) == counted(event.message for event in events if event.message)


def test_one_rank_takes_what_one_gpu_takes():
    laid_out = plan_step(STEP, parse("ddp=1"))
    alone = laid_out.step_seconds("T4", "PCIe 3 x16")
    assert alone.total == pytest.approx(laid_out.seconds("T4").total, rel=1e-9)
    assert alone.total == pytest.approx(plan_model_step(STEP).seconds("T4").total, rel=0.02)
    assert alone.bubble == 0 and not alone.exposed


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_slower_links_cost_time_and_never_work(laid, layout):
    plans = laid[layout]
    times = [
        plans.step_seconds("T4", link) for link in (LINKS["NVLink 3"], Link("slow", 1e6, 1e-3))
    ]
    fast, slow = times
    axis = "data" if layout.data > 1 else "tensor" if layout.tensor > 1 else "pipeline"
    assert fast.compute == slow.compute and fast.total < slow.total and slow.limit == axis
    for time in times:
        parts = time.compute + time.bubble + sum(time.exposed.values())
        assert time.total == pytest.approx(parts) and set(time.exposed) == {axis}
        assert all(value >= -1e-9 for value in time.exposed.values())
    own = max(rank.seconds("T4").total for rank in plans.ranks)
    assert fast.compute == pytest.approx(own, rel=0.05)  # and the launches of its messages
    assert (fast.bubble > 0) == (layout.pipeline > 1)


def test_what_cannot_be_timed_is_refused(laid):
    planned = laid[DDP]
    with pytest.raises(ValueError, match="No link is given for the data"):
        planned.step_seconds("A100-40GB", {"tensor": "NVLink 3"})
    with pytest.raises(ValueError, match='plan it for device="cuda"'):
        plan_step(STEP, parse("tensor=2"), "cpu").step_seconds("T4", "NVLink 3")


def test_a_rank_does_not_plan(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="is a rank already"):
            plan_step(STEP, DDP)
    finally:
        dist.destroy_process_group()


def test_a_plan_leaves_no_process_group_and_no_hook_behind():
    hook = sys.excepthook
    plan_step(STEP, parse("tensor=2"), "cpu")
    assert not dist.is_initialized() and sys.excepthook is hook
