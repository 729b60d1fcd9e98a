"""Lesson 25: the interval that it advises saves within a time limit, and its restart starts."""

import math
import re
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.lessons.cells import the_cell
from tight_fit.units import duration, size

BATCH = Path(__file__).resolve().parents[2] / "scripts" / "cluster.sbatch"


@pytest.fixture(scope="module")
def table():
    """What the cell of the table defines."""
    names = {"math": math, "size": size, "duration": duration}
    exec(the_cell("25", "hours = 54"), names)
    exec(the_cell("25", "def interval("), names)
    return names


def test_a_job_saves_at_least_twice_before_its_time_is_over(table):
    limit = re.search(r"--time=(\d+):(\d+):(\d+)", BATCH.read_text())
    hours, minutes, seconds = map(int, limit.groups())
    assert table["limit"] == 3600 * hours + 60 * minutes + seconds
    every = [int(row["save every"].removesuffix(" min")) for row in table["rows"]]
    assert len(every) == 4 and max(every) == table["limit"] / 2 / 60 and min(every) < 20


def test_the_interval_is_youngs_unless_the_time_limit_is_short(table):
    interval = table["interval"]
    assert interval(40, 20 * 3600, 10**9) == pytest.approx(2400)  # sqrt(2 * 40 * 72,000)
    assert interval(40, 20 * 3600, 3600) == 1800


class Line(torch.nn.Module):
    """A model that Trainer can train."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


def a_trainer(folder, steps):
    data = [{"x": torch.tensor([n / 8]), "labels": torch.tensor([1.0])} for n in range(8)]
    told = {"max_steps": steps, "save_steps": 2, "per_device_train_batch_size": 4}
    told["lr_scheduler_type"] = "constant"  # else it depends on how many steps are to come
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(folder), **told, **quiet, seed=0)
    return Trainer(Line(), arguments, train_dataset=data)


def test_the_restart_of_the_page_starts_and_goes_on(tmp_path):
    names = {"Path": Path}
    exec(the_cell("25", "get_last_checkpoint"), names)
    folder = tmp_path / "out"
    first = a_trainer(folder, 4)
    assert names["train"](first).global_step == 4  # nothing was saved before
    seen = []
    second = a_trainer(folder, 6)
    step = second.training_step
    second.training_step = lambda *given, **more: seen.append(1) or step(*given, **more)
    assert names["train"](second).global_step == 6 and len(seen) == 2
    whole = a_trainer(tmp_path / "whole", 6)
    whole.train()
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict())
