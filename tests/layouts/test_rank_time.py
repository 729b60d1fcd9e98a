"""The clocks of a rank: by hand, against the time of one GPU, and those of planned layouts."""

import sys
from dataclasses import replace

import pytest
import torch.distributed as dist
from transformers import LlamaConfig

from by_hand.timeline import simulate
from helpers.plan import plan
from helpers.recipe import Recipe
from tests.small import configured
from tight_fit.gpus.specs import find_gpu
from tight_fit.layouts.clocks import SLOWER, Clocks, Event, Stretch, events_of, play
from tight_fit.layouts.layout import parse
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.plan import plan_step
from tight_fit.layouts.schedules import consumer, gpipe, interleaved, one_f_one_b, zero_bubble
from tight_fit.layouts.seconds import LINKS, Link
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model_step

UPDATE, TAKEN_OVER, VALUE = Event("update"), Event("taken over"), Event("value")


def work(gpu: float, cpu: float = 0.0) -> Event:
    """A stretch of one kernel; the CPU needs `cpu` seconds to issue it."""
    return Event("work", Stretch(cpu, gpu, cpu))


def sends(kind: str, axis: str = "data") -> Event:
    return Event("message", None, SentMessage(kind, 1, 2, axis, ""))


def end(*events: Event, seconds: float = 1.0) -> float:
    return Clocks(lambda message: seconds).play(events)


def test_without_messages_it_is_the_time_of_one_gpu():
    """`Plan.seconds` goes through all operations one by one; here they are summed up."""
    fields = {"accumulation": 4, "precision": "fp16", "checkpointing": True}
    planned = plan(Recipe("vit", weights="random", batch_size=8, **fields))
    for name in ("T4", "A100-40GB"):
        alone = Clocks(lambda message: 1 / 0).play(events_of(planned.operations, find_gpu(name)))
        assert alone == pytest.approx(planned.seconds(name).total, rel=1e-9)


def test_the_cpu_holds_the_gpu_up_and_waits_for_values():
    assert end(work(1, cpu=3), work(1, cpu=3)) == 7  # launch-bound
    assert end(work(5, cpu=1), work(5, cpu=1)) == 11  # the CPU runs ahead
    assert end(work(5, cpu=1), VALUE, work(5, cpu=1)) == 12  # the lead is lost


def test_buckets_of_gradients_hide_behind_the_rest_of_the_backward_pass():
    bucket = sends("all_reduce")
    assert end(work(4), bucket, UPDATE, work(1)) == pytest.approx(6)  # the last one never hides
    slowed = 4 + 4 + (1 - 1 / SLOWER)  # a second of them goes on more slowly
    assert end(work(4), bucket, work(4), UPDATE) == pytest.approx(slowed)
    assert end(work(4), bucket, work(4), bucket, UPDATE) == pytest.approx(slowed + 1)
    many = end(work(4), bucket, bucket, bucket, work(1), UPDATE)
    assert many == pytest.approx(7)  # three follow one another over one link
    assert end(bucket, work(1), seconds=9) == pytest.approx(SLOWER), "kernels beside a message"


def test_layers_are_gathered_one_ahead_and_experts_after_their_layer():
    layer = (sends("all_gather"), TAKEN_OVER, work(4))
    # The first is waited for, the second comes while the first computes, not before it was taken.
    assert end(*layer) == pytest.approx(5)
    assert end(*layer, *layer) == pytest.approx(1 + 4 + 4, abs=0.2)
    slow = end(*layer, *layer, *layer, seconds=6)
    assert slow == pytest.approx(6 + 6 + 6 + 4)  # each is gathered after the one before is taken
    experts = sends("all_gather", "expert_data")
    assert end(layer[0], experts, TAKEN_OVER, TAKEN_OVER) == 2  # one stream for both


def test_some_messages_are_waited_for_at_once_and_gradients_by_the_update():
    assert end(work(2), sends("all_reduce", "tensor"), work(2)) == 5
    assert end(UPDATE, work(2), sends("broadcast"), work(2)) == 5
    assert end(sends("all_to_all", "expert"), sends("all_to_all", "expert")) == 2
    assert end(sends("reduce_scatter", "expert_data")) == 0
    assert end(sends("reduce_scatter", "expert_data"), UPDATE) == 1


def pipeline(ranks: int, micro_batches: int, schedule, transfer: float):
    """(end of a pipeline of equal stages by `play`, by `timeline.simulate`).

    As torch does it, the first stage has no gradient of its input to compute.
    """
    made = schedule(ranks, micro_batches)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    traced = []
    for own in made.actions:
        events = []
        for action in own:
            if action.kind == "I" and not action.stage:
                continue
            took = seconds[action.kind] + (action.kind == "W" and not action.stage)
            events += [Event("pass"), work(took / made.chunks)]
            if consumer(action, made.stages) is not None:
                events.append(sends("send", "pipeline"))
        traced.append(events)
    clocks = play(traced, lambda message: transfer, made)
    played = simulate(made, 1, 2, transfer=transfer)
    spans = [span.end for own in played.spans for span in own]
    return max(clock.gpu for clock in clocks), max(spans)


@pytest.mark.parametrize("transfer", (0.0, 0.25, 3.0))
@pytest.mark.parametrize("ranks, micro", ((2, 2), (2, 8), (4, 4), (4, 8), (3, 6)))
@pytest.mark.parametrize("schedule", (gpipe, one_f_one_b, interleaved, zero_bubble))
def test_a_pipeline_ends_when_the_simulated_schedule_does(schedule, ranks, micro, transfer):
    """With `zero_bubble` no later: the first stage computes a gradient for nobody."""
    played, simulated = pipeline(ranks, micro, schedule, transfer)
    least = 3 * micro + (ranks - 1) * {interleaved: 3 / 2, zero_bubble: 1}.get(schedule, 3)
    if schedule is zero_bubble:
        assert played <= simulated + 1e-9 and least <= played + 1e-9
        assert transfer or played < 3 * (micro + ranks)
    else:
        assert played == pytest.approx(simulated)
        assert transfer or played == pytest.approx(least)


# -- planned layouts ------------------------------------------------------------------------------

CONFIG = configured(LlamaConfig, 64, 2, 4, 128, 96, num_key_value_heads=2)
STEP = ModelStep(CONFIG, batch_size=16, length=64, accumulation=4, weights="fp32")
TENSORS = 21  # of its parameters


@pytest.mark.parametrize("text", ["ddp=2", "zero1=2", "zero2=2"])
def test_every_micro_batch_but_the_first_adds_to_the_gradients(text):
    added = []
    for accumulation in (4, 8):
        planned = plan_step(replace(STEP, accumulation=accumulation), parse(text))
        runs = planned.operations.counted().items()
        added.append(sum(n for (op, phase), n in runs if op.name == "add_" and phase == "backward"))
    assert added[1] - added[0] == (8 - 4) * TENSORS


@pytest.mark.parametrize(
    "axis, text",
    [("data", "ddp=2"), ("data", "fsdp=2"), ("tensor", "tensor=2"), ("pipeline", "pipeline=2")],
)
def test_slower_links_cost_time_and_never_work(axis, text):
    hook, laid_out = sys.excepthook, plan_step(STEP, parse(text))
    assert not dist.is_initialized() and sys.excepthook is hook  # nothing is left behind
    fast, slow = (
        laid_out.step_seconds("T4", link) for link in (LINKS["NVLink 3"], Link("slow", 1e6, 1e-3))
    )
    assert fast.compute == slow.compute and fast.total < slow.total and slow.limit == axis
    for time in (fast, slow):
        parts = time.compute + time.bubble + sum(time.exposed.values())
        assert time.total == pytest.approx(parts) and set(time.exposed) == {axis}
        assert all(value >= -1e-9 for value in time.exposed.values())
    own = max(rank.seconds("T4").total for rank in laid_out.ranks)
    assert fast.compute == pytest.approx(own, rel=0.05)  # and the launches of its messages
    assert (fast.bubble > 0) == (axis == "pipeline")
    for rank in laid_out.ranks:  # the trace holds every message that is sent
        events = events_of(rank.operations, find_gpu("T4"))
        traced = [event.message for event in events if event.message]
        facts = [
            sorted((sent.kind, sent.payload, sent.ranks, sent.axis) for sent in messages)
            for messages in (rank.sent, traced)
        ]
        assert facts[0] == facts[1] and rank.sent
    with pytest.raises(ValueError, match=f"No link is given for the {axis}"):
        laid_out.step_seconds("A100-40GB", {"context": "NVLink 3"})


def test_one_rank_takes_what_one_gpu_takes():
    laid_out = plan_step(STEP, parse("ddp=1"))
    alone = laid_out.step_seconds("T4", "PCIe 3 x16")
    assert alone.total == pytest.approx(laid_out.seconds("T4").total, rel=1e-9)
    assert alone.total == pytest.approx(plan_model_step(STEP).seconds("T4").total, rel=0.02)
    assert alone.bubble == 0 and not alone.exposed


def test_what_is_planned_for_a_cpu_has_no_time_on_a_gpu():
    planned = plan_step(STEP, parse("tensor=2"), "cpu")
    with pytest.raises(ValueError, match='plan it for device="cuda"'):
        planned.step_seconds("T4", "NVLink 3")
