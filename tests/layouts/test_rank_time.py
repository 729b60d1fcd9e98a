"""The clocks of a rank, by hand, and against the time of one GPU."""

import pytest

from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.gpus.specs import find_gpu
from tight_fit.layouts.clocks import SLOWER, Clocks, Event, Stretch, events_of, play
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.schedules import (
    consumer,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zero_bubble,
)

VIT = Recipe("vit", weights="random", batch_size=8, accumulation=2)
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
    for recipe in (VIT, replace(VIT, accumulation=4, precision="fp16", checkpointing=True)):
        planned = plan(recipe)
        for name in ("T4", "A100-40GB"):
            events = events_of(planned.operations, find_gpu(name))
            alone = Clocks(lambda message: 1 / 0).play(events)
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
    assert end(work(4), bucket, work(1), UPDATE, seconds=9) == pytest.approx(13)


def test_kernels_beside_a_message_are_slower():
    bucket = sends("all_reduce")
    assert end(bucket, work(1), seconds=9) == pytest.approx(SLOWER)
    assert end(bucket, work(10), seconds=SLOWER) == pytest.approx(10 + SLOWER - 1)


def test_layers_are_gathered_one_ahead():
    layer = (sends("all_gather"), TAKEN_OVER, work(4))
    # The first is waited for, the second comes while the first computes, not before it was taken.
    assert end(*layer) == pytest.approx(5)
    assert end(*layer, *layer) == pytest.approx(1 + 4 + (1 - 1 / SLOWER) * 0 + 4, abs=0.2)
    slow = end(*layer, *layer, *layer, seconds=6)
    assert slow == pytest.approx(6 + 6 + 6 + 4)  # each is gathered after the one before is taken


def test_tensor_messages_are_waited_for():
    assert end(work(2), sends("all_reduce", "tensor"), work(2)) == 5
    assert end(UPDATE, work(2), sends("broadcast"), work(2)) == 5


def pipeline(ranks: int, micro_batches: int, schedule, transfer: float):
    """(end of a pipeline of equal stages by `play`, by `schedules.simulate`).

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


SIZES = pytest.mark.parametrize("stages, micro_batches", ((2, 1), (2, 8), (4, 4), (4, 8), (3, 7)))
TRANSFERS = pytest.mark.parametrize("transfer", (0.0, 0.25, 3.0))


@pytest.mark.parametrize("schedule", (gpipe, one_f_one_b))
@SIZES
@TRANSFERS
def test_a_pipeline_ends_when_the_simulated_schedule_does(
    schedule, stages, micro_batches, transfer
):
    played, simulated = pipeline(stages, micro_batches, schedule, transfer)
    assert played == pytest.approx(simulated)
    if not transfer:
        bubble = (stages - 1) * 3
        assert played == pytest.approx(3 * micro_batches + bubble)


@pytest.mark.parametrize("stages, micro_batches", ((2, 2), (2, 8), (4, 4), (4, 8)))
@TRANSFERS
def test_several_stages_on_a_rank_have_a_part_of_the_bubble(stages, micro_batches, transfer):
    played, simulated = pipeline(stages, micro_batches, interleaved, transfer)
    assert played == pytest.approx(simulated)
    if not transfer:
        assert played == pytest.approx(3 * micro_batches + (stages - 1) * 3 / 2)


@pytest.mark.parametrize("stages, micro_batches", ((2, 2), (2, 8), (4, 4), (4, 8), (3, 7)))
@TRANSFERS
def test_gradients_of_weights_fill_the_bubble(stages, micro_batches, transfer):
    """They end no later than simulated, where the first stage computes a gradient for nobody."""
    played, simulated = pipeline(stages, micro_batches, zero_bubble, transfer)
    assert played <= simulated + 1e-9
    if not transfer:
        assert 3 * micro_batches + (stages - 1) <= played + 1e-9 < 3 * micro_batches + stages * 3
