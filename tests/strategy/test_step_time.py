"""The model of a step's time: by hand, and of a planned layout."""

from types import SimpleNamespace

import pytest

from helpers.parallel import Parallel
from helpers.parallel.comm_meter import SentMessage
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from helpers.strategy.plan_ranks import plan_parallel
from helpers.strategy.step_time import LINKS, UTILIZATION, Link, rate, step, transfer

VIT = Recipe("vit", weights="random", batch_size=8, accumulation=2)


def test_time_of_a_ring():
    """An all-reduce over four: 2·3 messages of a quarter each; by hand."""
    message = SentMessage("all_reduce", payload=4_000_000, ranks=4, axis="data", phase="backward")
    assert transfer(message, Link("slow", 1e6, 0.5)) == pytest.approx(6 * (1e6 / 1e6 + 0.5))


def test_what_hides_behind_work():
    """By hand: two seconds forward, four backward, messages of a second each at 1 MB/s."""

    def seconds(layout, *phases, axis="data", accumulation=1):
        sent = [SentMessage("send", 1_000_000, 2, axis, phase) for phase in phases]
        rank = SimpleNamespace(
            flops={"forward": 2 * rate("T4", "fp32"), "backward": 4 * rate("T4", "fp32")}, sent=sent
        )
        recipe = replace(VIT, batch_size=20, accumulation=accumulation)
        time = step(
            SimpleNamespace(parallel=layout, recipe=recipe, ranks=[rank]),
            "T4",
            Link("slow", 1e6, 0.0),
        )
        assert time.compute == pytest.approx(6) and time.exposed[axis] + time.hidden[
            axis
        ] == pytest.approx(len(phases))
        return time.exposed[axis]

    ddp, fsdp, back = Parallel(data=2), Parallel(data=2, zero_stage=3), "backward"
    assert seconds(ddp, *[back] * 3) == pytest.approx(1)  # the last bucket
    assert seconds(ddp, *[back] * 7) == pytest.approx(3)
    assert seconds(ddp, *[back] * 7, accumulation=4) == pytest.approx(
        6
    )  # one backward pass of four hides one second
    assert seconds(ddp, *[back] * 2, *["optimizer"] * 2) == pytest.approx(3)
    assert seconds(fsdp, "forward", back) == pytest.approx(
        2
    )  # the first gathering and the last scattering
    assert seconds(fsdp, *["forward"] * 5, *[back] * 3) == pytest.approx(
        3 + 1
    )  # the forward pass hides two, not six
    stages = Parallel(pipeline=2)
    assert seconds(stages, *["forward"] * 4, axis="pipeline", accumulation=4) == pytest.approx(
        2
    )  # to fill and to drain
    assert seconds(stages, *["forward"] * 20, axis="pipeline", accumulation=20) == pytest.approx(
        14
    )  # work hides no more than it lasts
    assert seconds(stages, "forward", axis="pipeline") == pytest.approx(1)


def test_time_of_a_step():
    recipe = Recipe(profile="full", model="vit", batch_size=64, precision="bf16")
    laid = plan_parallel(recipe, Parallel(data=8))
    fast, slow = (laid.seconds("A100-40GB", link) for link in ("NVLink 3", "Ethernet 1 Gbit"))
    assert (
        fast.compute
        == slow.compute
        == pytest.approx(sum(laid.ranks[0].flops.values()) / (312e12 * UTILIZATION))
    )
    assert fast.total < slow.total and slow.limit == "data" and slow.total > slow.compute
    assert plan(recipe).flops["forward"] == 8 * laid.ranks[0].flops["forward"]
    with pytest.raises(ValueError, match="no bf16"):
        rate("T4", "bf16")
    with pytest.raises(ValueError, match="No link is given for the data"):
        laid.seconds("A100-40GB", {"tensor": "NVLink 3"})
    with pytest.raises(ValueError, match="link='string' is not known"):
        laid.seconds("A100-40GB", "string")
    assert all(link.speed > 0 < link.latency for link in LINKS.values())
