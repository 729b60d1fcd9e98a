"""Steps on two GPUs: which there are, in what order, and what becomes of the ranks' figures.

What runs on the GPUs themselves is tried on pretended ones, in tests/tools/test_pretended.py.
"""

import pytest

from benchmarks import gpu_layouts, measured_steps, proof, room
from helpers.parallel import RankFailed
from helpers.recipe import Recipe
from tight_fit import gpus
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.plan import plan_step
from tight_fit.layouts.rank import local_step
from tight_fit.layouts.seconds import LINKS, transfer

RANKS = [
    {"allocated": 90, "reserved": 110, "seconds": 0.2, "large": 0.03, "small": 3e-5},
    {"allocated": 100, "reserved": 105, "seconds": 0.3, "large": 0.02, "small": 2e-5},
]
DDP = "DDP on 2 GPUs"
MINI = Recipe("decoder", profile="mini", batch_size=8, length=32, weights="random")


def test_every_layout_suits_its_step():
    for _, technique, recipe in gpu_layouts.cases():
        layout, micro_batches = gpu_layouts.LAYOUTS[technique]
        assert layout.ranks == 2 and recipe.accumulation == micro_batches
        assert local_step(gpu_layouts.step_of(recipe), layout).micro_batch >= 1


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(gpus, "here", lambda: gpus.GPUS["T4"])
    monkeypatch.setattr(gpu_layouts, "measure", lambda *_: RANKS)
    monkeypatch.setattr(gpu_layouts, "of_device", lambda name: "T4")
    return ("a model", DDP, MINI)


def test_a_step_has_the_figures_of_its_fullest_and_slowest_rank(two_gpus):
    step = measured_steps.one(two_gpus)
    planned = plan_step(gpu_layouts.step_of(MINI), gpu_layouts.LAYOUTS[DDP][0])
    assert (step.planned, step.allocated, step.reserved) == (planned.peak, 100, 110)
    assert step.planned_allocated == planned.allocator_peaks("T4").allocated
    assert (step.seconds, step.link["bytes_per_second"]) == (0.3, 2**28 / 0.02)
    assert step.planned_seconds == planned.step_seconds("T4", gpu_layouts.link_of(RANKS)).total
    assert proof.Step.from_dict(step.to_dict()) == step


def test_a_gpu_of_unknown_speed_has_no_planned_seconds(two_gpus, monkeypatch):
    monkeypatch.setattr(gpu_layouts, "of_device", lambda name: None)
    assert measured_steps.one(two_gpus).planned_seconds is None


def test_a_step_that_is_too_large_is_not_begun(two_gpus, monkeypatch):
    monkeypatch.setattr(room, "MEMORY_FRACTION", 0.0)
    monkeypatch.setattr(gpu_layouts, "measure", lambda *_: pytest.fail("it was begun"))
    assert measured_steps.one(two_gpus) is None


@pytest.mark.parametrize("name", ["PCIe 3 x16", "NVLink 4"])
def test_the_link_is_the_one_whose_messages_take_so_long(name):
    """Of the model of time, whose all-reduce between two ranks it is the reverse of."""
    link = LINKS[name]
    sizes = {"large": gpu_layouts.LARGE, "small": gpu_layouts.SMALL}
    seconds = {
        kind: transfer(SentMessage("all_reduce", size, 2, "data", "backward"), link)
        for kind, size in sizes.items()
    }
    found = gpu_layouts.link_of([seconds, seconds])
    assert found.speed == pytest.approx(link.speed, rel=0.02)
    assert found.latency == pytest.approx(link.latency, rel=0.02)


def test_a_rank_that_fails_is_told_in_its_own_words(monkeypatch):
    def failed(*_, **options):
        raise RankFailed(1, 2, 1, "Traceback ...\nRuntimeError: out of memory")

    monkeypatch.setattr(gpu_layouts, "launch", failed)
    with pytest.raises(RuntimeError, match="^RuntimeError: out of memory$"):
        gpu_layouts.measure(MINI, gpu_layouts.LAYOUTS[DDP][0])
