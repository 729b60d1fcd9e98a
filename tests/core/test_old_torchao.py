"""Beside a torchao that peft refuses, everything with adapters works as without any torchao.

A package of that name and release stands for it, in a process of its own.
"""

import json
import os

import pytest

from tests.small import ROOT, python
from tight_fit import old_torchao
from tight_fit.plans.model import plan_model

NEEDS = 'from tight_fit.packages import needs\nneeds("peft")\nneeds("peft")\n'
ADAPTED = """
import torch
from peft import LoraConfig, get_peft_model
def adapted(weight):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model[0].weight = torch.nn.Parameter(weight)
    return type(get_peft_model(model, LoraConfig(r=2, target_modules=["0"])).base_model.model[0])
print(adapted(torch.zeros(4, 4)).__module__, flush=True)
from torchao.utils import TorchAOBaseTensor
adapted(torch.zeros(4, 4).as_subclass(TorchAOBaseTensor))
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs Python beside torchao of a release: (what it printed, its last line)."""

    def run(release, *arguments, path=(".", ROOT)):
        (tmp_path / "torchao").mkdir(exist_ok=True)
        (tmp_path / "torchao" / "__init__.py").touch()
        tensor = "import torch\nclass TorchAOBaseTensor(torch.Tensor): pass\n"
        (tmp_path / "torchao" / "utils.py").write_text(tensor)
        described = tmp_path / f"torchao-{release}.dist-info"
        described.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: torchao\nVersion: {release}\n"
        (described / "METADATA").write_text(text)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        done = python("-P", *arguments, env=env, cwd=tmp_path)
        return done.stdout, (done.stderr.strip().splitlines() or [""])[-1]

    return run


def test_a_cell_that_needs_peft_makes_adapters(run):
    """And those for layers of torchao's own are still refused."""
    printed, error = run("0.10.0", "-c", NEEDS + ADAPTED)
    assert printed == "peft.tuners.lora.layer\n"
    assert error.startswith("ImportError: Found an incompatible version of torchao")


def test_a_torchao_that_is_new_enough_is_seen(run):
    """It is found after transformers, which would import more of it than there is here."""
    found = "import peft, sys\nsys.path.insert(0, '.')\n"
    asked = "print(peft.tuners.lora.torchao.is_torchao_available())"
    printed, error = run("0.16.0", "-c", f"{found}{NEEDS}{asked}", path=(ROOT,))
    assert printed == "True\n", error


@pytest.mark.parametrize("there, old", [("0.10.0", True), ("0.16.0", False), ("1.2", False)])
def test_which_releases_are_too_old(monkeypatch, there, old):
    monkeypatch.setattr("importlib.metadata.version", lambda name: there)
    assert old_torchao.release() == (there if old else None)


def test_the_first_cell_says_that_it_is_hidden_and_the_command_plans_adapters(run):
    printed, error = run("0.10.0", "-c", "from helpers.setup import setup; setup()")
    assert printed.count("Mind: peft refuses the installed torchao 0.10.0") == 1, error
    config = ROOT / "helpers" / "configs" / "deberta"
    asked = "--gpu", "T4", "--lora", "8", "--batch", "2", "--length", "64"
    options = "--quick", "--fresh", "--json"
    printed, error = run("0.10.0", "-m", "tight_fit", config, *asked, *options)
    expected = plan_model(config, lora_rank=8, batch_size=2, length=64)
    assert json.loads(printed)["peak"] == expected.peak, error
