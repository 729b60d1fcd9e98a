"""Imports that are put off: they are not made, and what was to be imported works as before."""

import sys

import pytest
from transformers import BertConfig, LlamaConfig

from tests.small import configured, python
from tight_fit.command import main

START = """
import sys
from tight_fit.command.deferred import _Deferred, put_off
put_off()
def waits(name):
    return isinstance(sys.modules.get(name), _Deferred)
"""
MATCHING = """
from transformers.loss.loss_for_object_detection import linear_sum_assignment
assert waits("scipy.optimize")
print(*linear_sum_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])[1])
import scipy.optimize
assert not waits("scipy.optimize")
assert scipy.optimize.linear_sum_assignment is not linear_sum_assignment
print(round(scipy.optimize.minimize_scalar(lambda x: (x - 2) ** 2).x, 6))
"""
USED = """
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.distributed import sharding_utils, utils
from transformers.integrations import finegrained_fp8
held = torch._dynamo
assert waits("torch._dynamo") and waits("torch.distributed.tensor")
plain = torch.nn.Parameter(torch.ones(3))
assert not utils.is_dtensor(plain)
torch.optim.SGD([plain]).step()
assert waits("torch._dynamo") and waits("torch.distributed.tensor")

import torch._dynamo.trace_rules as rules
assert held is sys.modules["torch._dynamo"] is torch._dynamo and not waits("torch._dynamo")
assert rules is torch._dynamo.trace_rules is torch._dynamo.decorators.trace_rules
told = finegrained_fp8._load_finegrained_fp8_kernel
assert rules.is_callable_allowed(told) and not rules.is_callable_allowed(put_off)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
many = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()])
assert isinstance(many, DTensor) and utils.is_dtensor(many) and not utils.is_dtensor(plain)
print(sharding_utils._tied_params_are_equal(many, many))
from accelerate.utils import extract_model_from_parallel, send_to_device
layer = torch.nn.Linear(2, 3)
assert extract_model_from_parallel(layer) is layer and not waits("accelerate.utils")
print("end")
"""
PLAN = """
from tight_fit.command.main import entry
sys.argv = ["tight-fit", sys.argv[1], "--gpu", "8GB", "--quick"]
entry()
waiting = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "accelerate",
           "transformers.distributed.checkpoint")
print([name for name in waiting if name in sys.modules and not waits(name)])
print([name for name in ("torch._dynamo.utils", "torch.onnx") if name in sys.modules])
import transformers
print([] if "_few" in vars(transformers) and "_few" in vars(transformers.models) else "all read")
"""
NAMES = """
import transformers
few = dict(transformers._class_to_module)
assert "BertModel" not in few and "AutoModel" in few and len(few) > 100
from transformers import initialization
assert transformers.models.bert.__name__ == "transformers.models.bert"
assert not hasattr(transformers, "__wrapped__") and "_few" in vars(transformers)
print(len(transformers.__all__) > 2000)
whole = transformers._class_to_module
print([name for name in few if few[name] != whole[name]])
assert transformers.models.LlamaModel is transformers.LlamaModel
assert not hasattr(transformers, "NoSuchModel") and not hasattr(transformers.models, "NoSuch")
print(*sorted(transformers.__all__))
print(*sorted(transformers.models.__all__))
print(*sorted(dir(transformers.models)))
"""


def test_the_matching_is_imported_when_it_is_called_and_all_else_at_once():
    done = python("-c", START + MATCHING)
    # by hand: 1 + 2 + 2 is the least of the six sums
    assert done.stdout.split() == ["1", "0", "2", "2.0"], done.stderr


def test_what_waited_is_the_real_thing_once_it_is_used():
    done = python("-c", START + USED)
    told = done.stdout.splitlines()  # DeepSpeed, where it is installed, adds lines of its own
    assert told[:2] == ["2.0", "True"] and told[-1] == "end", done.stdout + done.stderr


def test_names_of_models_that_were_not_read_are_those_that_transformers_finds():
    few = python("-c", START + NAMES).stdout.splitlines()
    whole = python(
        "-c",
        "import transformers as t, transformers.models.bert, transformers.models as m\n"
        "print(*sorted(t.__all__))\nprint(*sorted(m.__all__))\nprint(*sorted(dir(m)))",
    ).stdout.splitlines()
    assert few[:4] == ["True", "[]", *whole[:2]]
    assert set(whole[2].split()) <= set(few[4].split())  # what was imported is there as well


def test_nothing_waits_where_a_step_is_compiled(monkeypatch):
    """Its graphs are others where decorators of Dynamo did nothing while models were imported."""
    put_off = []
    monkeypatch.setattr(main, "run", lambda work, name: 0)
    monkeypatch.setattr(main.deferred, "put_off", lambda: put_off.append(sys.argv[-1]))
    for last in ("--compile", "--quick"):
        monkeypatch.setattr(sys, "argv", ["tight-fit", "gpt2", "--gpu", "T4", last])
        main.entry()
    assert put_off == ["--quick"]


@pytest.mark.parametrize("kind", [BertConfig, LlamaConfig])
def test_a_plan_imports_nothing_of_what_it_does_not_use(kind, tmp_path):
    file = tmp_path / "config.json"
    configured(kind, 64, 2, 2, 128, 100).to_json_file(file)
    done = python("-c", START + PLAN, file)
    assert done.stdout.splitlines()[-3:] == ["[]"] * 3, done.stdout + done.stderr
