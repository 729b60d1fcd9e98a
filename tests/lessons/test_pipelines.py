"""Lesson 15: what it says of GPipe's memory, by plan, of its pasted stage, and of libraries."""

from dataclasses import fields

import pytest
import torch
from accelerate.utils import MegatronLMPlugin
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.forked import forked, results
from tests.lessons.cells import markdown_of, own_code, the_cell
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.layouts.stages import DecoderStage
from tight_fit.models.step import ModelStep

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
    num_attention_heads=4, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("precision, grows", [("bf16", True), ("fp32", False)])
def test_more_micro_batches_cost_gpipe_memory_only_under_autocast(precision, grows):
    assert "autocast makes 16-bit copies of the weights for each micro-batch" in markdown_of("15")
    layout = parse("pipeline=2", schedule="gpipe")
    few, many = (
        plan_step(
            ModelStep(
                CONFIG, 16, 8, accumulation=count, weights="fp32", precision=precision,
            ),
            layout,
        ).peak
        for count in (4, 16)
    )  # fmt: skip
    assert (many > 1.3 * few) == grows and many < (4 if grows else 1.2) * few


@pytest.mark.parametrize("index", [0, 1])
def test_the_pasted_stage_keeps_what_the_planned_one_keeps(index):
    """In bf16, as the tables are, by what autograd saves of a forward pass."""
    scope = {"nn": nn, "torch": torch}
    exec(own_code("15", ("class Stage(",)), scope)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    step = ModelStep(CONFIG, 2, 16, weights="fp32", precision="bf16")
    given = torch.randint(96, (2, 16)) if index == 0 else torch.randn(2, 16, 64)
    with torch.autocast("cpu", torch.bfloat16):
        pasted, gives = saved(scope["Stage"](model, index, 2), given)
    planned, expected = saved(DecoderStage(model, index, 2, step), given)
    torch.testing.assert_close(gives, expected, rtol=0, atol=0)
    assert pasted == pytest.approx(planned, rel=0.01)


def test_its_steps_are_those_of_the_whole_model_tied_or_not_and_clipped(tmp_path):
    """On two ranks: norms and weights after three steps, and what is saved of them."""
    loss_fn = the_cell("15", "def loss_fn(").partition("store = ")[0]
    text = own_code("15", ("class Stage(", "def clip(", "def save(")) + loss_fn
    for told in results(forked("tests/ranks/clipped_stages.py", text, tmp_path, ranks=2)):
        for case in told.values():
            assert all(right > 0.5 for _, right in case["norms"])  # each step is clipped
            assert all(norm == pytest.approx(right, rel=1e-5) for norm, right in case["norms"])
            assert case["apart"] < 1e-5 and case["weights"] >= 10
            assert case["read"] < 1e-5  # by from_pretrained, under the model's own names


def saved(module, given):
    """(bytes that autograd keeps of a forward pass beside the weights, what the module gives)."""
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes()  # alive: no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(given.requires_grad_() if given.is_floating_point() else given)
    return sum(size for _, size in kept.values()), result


def test_accelerate_has_pipelines_by_megatron():
    assert "MegatronLMPlugin(pp_degree=4)" in markdown_of("15")
    assert "pp_degree" in {field.name for field in fields(MegatronLMPlugin)}
