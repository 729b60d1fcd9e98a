"""The scripts that lessons show: every way to split the same fine-tune gives the same losses."""

import re
from pathlib import Path

import pytest

from tests.forked import forked

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")
STEPS = ("--steps", 3)


def losses(printed):
    return {int(step): float(loss) for text in printed for step, loss in LOSS.findall(text)}


@pytest.fixture(scope="module")
def alone():
    """The losses of one process."""
    return losses(forked(SCRIPTS / "ddp.py", *STEPS, ranks=1))


SPLIT = [
    ("ddp.py", ()),
    ("tensor_parallel.py", ()),
    ("pipeline.py", ("--schedule", "gpipe")),
    ("pipeline.py", ("--schedule", "1f1b")),
]


@pytest.mark.parametrize("name, arguments", SPLIT)
def test_two_ranks_have_the_losses_of_one_process(name, arguments, alone):
    assert len(alone) == 2 and alone[3] < alone[1]
    split = losses(forked(SCRIPTS / name, *STEPS, *arguments, ranks=2))
    assert split == pytest.approx(alone, abs=2e-4)  # printed to four digits


def test_layers_that_are_cut_are_clipped_and_trained_by_the_optimizer_of_cuda(alone):
    clipped = ("tests/ranks/foreach.py", SCRIPTS / "tensor_parallel.py", *STEPS, "--clip", 0.01)
    two, one = (losses(forked(*clipped, ranks=ranks)) for ranks in (2, 1))
    assert two == pytest.approx(one, abs=2e-4) and two[3] < two[1]
    assert two[1] == pytest.approx(alone[1], abs=2e-4)  # nothing is clipped before the first step


REFUSED = [
    ("tensor_parallel.py", ("--clip", 0), "--clip must be more than 0"),
    ("pipeline.py", ("--micro-batches", 1), "1f1b needs a micro-batch per rank"),
    ("expert_parallel.py", ("--balance", -1), "--balance must be at least 0"),
]


@pytest.mark.parametrize("name, arguments, says", REFUSED)
def test_what_a_script_cannot_do_it_says(name, arguments, says):
    with pytest.raises(RuntimeError, match=says):
        forked(SCRIPTS / name, *arguments, ranks=2)


def test_shards_of_two_ranks_are_resumed_by_three(alone, tmp_path):
    """Three steps and three more are the six steps of a run that never stopped."""
    saved = forked(SCRIPTS / "fsdp.py", *STEPS, "--save", tmp_path / "state", ranks=2)
    assert losses(saved) == pytest.approx(alone, abs=2e-4)
    resume = ("--resume", tmp_path / "state")
    resumed = losses(forked(SCRIPTS / "fsdp.py", *STEPS, *resume, ranks=3))
    whole = losses(forked(SCRIPTS / "ddp.py", "--steps", 6, ranks=1))
    assert set(resumed) == {4, 6} and resumed[6] == pytest.approx(whole[6], abs=2e-4)
