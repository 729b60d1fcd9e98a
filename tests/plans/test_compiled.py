"""What a compiled step keeps, planned from its graph, beside what inductor's code really keeps."""

import shutil

import pytest
import torch
import transformers as library
from torch import nn

from tests.small import configured
from tight_fit.models.made import FlatLogits, Logits, make, prepare
from tight_fit.models.step import ModelStep
from tight_fit.plans.compiled import kept_bytes, measure_compiled, plan_compiled
from tight_fit.plans.model import measured
from tight_fit.techniques.compiled import compiled

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = configured(library.LlamaConfig, 64, 2, 4, 128, 211, num_key_value_heads=2)


def step(**fields) -> ModelStep:
    return ModelStep(SMALL, batch_size=4, length=24, **fields)


class Chain(nn.Module):
    """x -> sin(cos(W x)) -> sum, with a label that is not read; its kept tensors count by hand."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return Logits(self.line(x).cos().sin())


def inputs(model, step):
    return {"x": torch.randn(8, 64), "labels": torch.zeros(8, dtype=torch.long)}


def test_eager_keeps_what_each_formula_needs(monkeypatch):
    """The product its input, the cosine the product's result, the sine that of the cosine, and the
    loss its log-softmax, its labels and one number."""
    monkeypatch.setattr("tight_fit.plans.compiled.batch", inputs)
    kept = kept_bytes(Chain(), step())  # type: ignore[arg-type]
    assert kept == 4 * (8 * 64 * 4) + 8 * 8 + 4


def test_a_compiled_decoder_keeps_less_and_does_not_break():
    planned = plan_compiled(step())
    assert planned.graphs == 1 and 0.1 < planned.saved < 0.5


def test_the_eager_side_is_that_of_real_tensors():
    planned = plan_compiled(step(precision="bf16"))
    asked = step(precision="bf16")
    model = prepare(make(asked), asked)
    assert isinstance(model, FlatLogits) and kept_bytes(model, asked) == planned.eager
    assert planned.eager < measured(asked).highest["activations"] < 2 * planned.eager


def test_the_compiled_side_is_that_of_inductors_code_to_the_byte():
    asked = step(precision="bf16")
    planned, real = plan_compiled(asked), measure_compiled(asked)
    assert planned == real


MADE_ON_IMPORT = torch.ones(())  # as constants of a model's module are


class Scaled(Chain):
    def forward(self, x):
        return Logits(super().forward(x).logits * MADE_ON_IMPORT)


def test_a_model_may_read_a_tensor_that_was_there_before(monkeypatch):
    monkeypatch.setattr("tight_fit.models.made.empty", lambda step: Scaled())
    monkeypatch.setattr("tight_fit.plans.compiled.batch", inputs)
    planned = plan_compiled(step())
    assert planned.graphs == 1 and planned.compiled < planned.eager


@pytest.mark.parametrize("there", ["g++", "clang++", "neither"])
def test_one_compiler_is_enough_on_a_cpu_and_none_is_one_sentence(there, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name if name == there else None)
    line = nn.Linear(1, 1)
    if there == "neither":
        with pytest.raises(RuntimeError, match="needs a C.. compiler on a CPU"):
            compiled(line)
    else:
        assert compiled(line) is line
