"""A small training program, and the plan of a program."""

import json

import pytest

from tight_fit.gpus import find
from tight_fit.script import process
from tight_fit.script.program import ToPlan, script_of

HEAD = """\
import torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(256, 256).to(device)
optimizer = torch.optim.AdamW(model.parameters())
"""
STEP = """\
    loss = model(torch.rand(8, 256, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOOP = f"{HEAD}for step in range(100):\n{STEP}"


def run(path: str, *arguments: str, gpu: str = "T4", seconds: float = 60.0, **wanted):
    asked = ToPlan(path, arguments, find(gpu), **wanted)
    return process.plan(asked, script_of(path, arguments), seconds)


def same_plan(callback, lines, facts, reserved: int, allocated: int) -> None:
    """A callback planned what `tight-fit script` plans, but for up to so many bytes less, of the
    longest batch of 8 × 64, and said so in one line."""
    (line,), found = lines, callback.facts
    assert found["batch"] == facts["batch_longest"] == [8, 64]
    assert json.loads(json.dumps(found)) == found
    assert found["terms"].keys() == facts["terms"].keys()
    assert sum(found["terms"].values()) == found["need"]
    assert 0 <= facts["reserved"] - found["reserved"] <= reserved
    assert 0 <= facts["allocated"] - found["allocated"] <= allocated
    assert found["seconds"] == pytest.approx(facts["longest_seconds"], rel=0.15)
    assert "(8 × 64)" in line and "it fits. A step takes about" in line
