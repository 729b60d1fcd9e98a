"""A small training program, and the plan of a program."""

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


def run(path: str, *arguments: str, gpu: str | None = "T4", seconds: float = 60.0, **wanted):
    """The facts of a program's plan for a GPU, or for the CPU that a real run is recorded on."""
    asked = ToPlan(path, arguments, gpu and find(gpu), **wanted)
    return process.plan(asked, script_of(path, arguments), seconds)


def taken(facts) -> list[int]:
    """The bytes that each planned step takes beside what is there when it begins."""
    return [step["peak"] - step["begin"] for step in facts["steps"]]
