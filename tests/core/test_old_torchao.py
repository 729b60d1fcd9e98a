"""Beside a torchao that peft refuses, everything with adapters works as without any torchao.

A package of that name and release stands for it, in a process of its own.
"""

import json
import os
from pathlib import Path

import pytest

from tests.small import python
from tight_fit import old_torchao
from tight_fit.plans.model import plan_model

ROOT = Path(__file__).resolve().parents[2]
TENSOR = "import torch\nclass TorchAOBaseTensor(torch.Tensor): pass\n"
REFUSED = "Found an incompatible version of torchao"
ADAPTED = """
import torch
from peft import LoraConfig, get_peft_model
def adapted(weight=None):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    if weight is not None:
        model[0].weight = torch.nn.Parameter(weight)
    return type(get_peft_model(model, LoraConfig(r=2, target_modules=["0"])).base_model.model[0])
"""
NEEDS = 'from tight_fit.packages import needs\nneeds("peft")\nneeds("peft")\n'
ITS_OWN = """
from torchao.utils import TorchAOBaseTensor
print(adapted(torch.zeros(4, 4).as_subclass(TorchAOBaseTensor)).__name__)
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs Python beside torchao of a release: (what it printed, its last line)."""

    def run(release, *arguments, path=(".", ROOT)):
        (tmp_path / "torchao").mkdir()
        (tmp_path / "torchao" / "__init__.py").touch()
        (tmp_path / "torchao" / "utils.py").write_text(TENSOR)
        described = tmp_path / f"torchao-{release}.dist-info"
        described.mkdir()
        text = f"Metadata-Version: 2.1\nName: torchao\nVersion: {release}\n"
        (described / "METADATA").write_text(text)
        done = python(
            "-P",
            *map(str, arguments),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
            cwd=tmp_path,
        )
        return done.stdout, (done.stderr.strip().splitlines() or [""])[-1]

    return run


def test_a_cell_that_needs_peft_makes_adapters(run):
    """And those for layers of torchao's own are still refused."""
    printed, error = run(
        "0.10.0", "-c", f"{NEEDS}{ADAPTED}print(adapted().__module__, flush=True)\n{ITS_OWN}"
    )
    assert printed == "peft.tuners.lora.layer\n"
    assert error.startswith(f"ImportError: {REFUSED}")


def test_a_torchao_that_is_new_enough_is_seen(run):
    """It is found after transformers, which would import more of it than there is here."""
    found = "import peft, sys\nsys.path.insert(0, '.')\n"
    asked = "print(peft.tuners.lora.torchao.is_torchao_available())"
    printed, error = run("0.16.0", "-c", f"{found}{NEEDS}{asked}", path=(ROOT,))
    assert printed == "True\n", error


def test_the_first_cell_says_in_one_sentence_that_it_is_hidden(run):
    printed, error = run("0.10.0", "-c", "from helpers.setup import setup; setup()")
    assert printed.count("Mind: peft refuses the installed torchao 0.10.0") == 1, error


@pytest.mark.parametrize("there, old", [("0.10.0", True), ("0.16.0", False), ("1.2", False)])
def test_which_releases_are_too_old(monkeypatch, there, old):
    monkeypatch.setattr("importlib.metadata.version", lambda name: there)
    assert old_torchao.release() == (there if old else None)


def test_the_command_plans_adapters(run):
    config = ROOT / "helpers" / "configs" / "deberta"
    asked = "--gpu", "T4", "--lora", "8", "--batch", "2", "--length", "64"
    printed, _ = run("0.10.0", "-m", "tight_fit", config, *asked, "--quick", "--fresh", "--json")
    expected = plan_model(config, lora_rank=8, batch_size=2, length=64)
    assert json.loads(printed)["peak"] == expected.peak
