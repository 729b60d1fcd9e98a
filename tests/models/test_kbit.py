"""--kbit: the model that peft's `prepare_model_for_kbit_training` makes, to the byte."""

import pytest
import torch
import transformers as library

from tests.small import configured
from tight_fit.memory.plan import to_plan
from tight_fit.models.made import FlatLogits, make, prepare
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import batch, measured, plan_model_step
from tight_fit.techniques import four_bits, model_changes, targets
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step
from tight_fit.trace.steps import trace_step

peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")

SIZES = 64, 3, 4, 128, 512
CONFIGS = {
    "llama": configured(library.LlamaConfig, *SIZES, tie_word_embeddings=False),
    "qwen2": configured(library.Qwen2Config, *SIZES, num_key_value_heads=2),  # biases, a tied head
}


def step_of(name: str, **fields) -> ModelStep:
    return ModelStep(
        CONFIGS[name], batch_size=4, length=32, precision="bf16", base="nf4", lora_rank=4,
        task="causal-lm", **fields,
    )  # fmt: skip


def by_peft(step: ModelStep) -> FlatLogits:
    """The same step's model, prepared by peft's own function in place of ours."""
    model = make(step)
    four_bits.quantize(model, torch.bfloat16)
    peft.prepare_model_for_kbit_training(model)
    names = targets.targets_of(model, step.lora_targets)
    model_changes.add_lora(model, step.lora_rank, names, None, None, step.lora_scale)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model = FlatLogits(model, "causal-lm").train()
    for layer in model.modules():  # the library's first forward pass gives biases their dtype again
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            given = torch.zeros(1, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
            bitsandbytes.nn.Linear4bit.forward(layer, given)
    return model


def taken(model: FlatLogits, step: ModelStep):
    """The plan that the second of two real steps gives, as `measured` makes it."""
    optimizer = make_optimizer(model, step)
    train_step(model, optimizer, [batch(model, step)], step.batch_size, step)
    trace = trace_step(model, optimizer, lambda: batch(model, step), step)
    return to_plan((trace, four_bits.count_parameters(model)), step, "cpu")


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_model_that_peft_makes(name):
    step = step_of(name, kbit=True)
    ours, theirs = prepare(make(step), step), by_peft(step_of(name))
    found = [
        [(key, part.dtype, tuple(part.shape), part.requires_grad) for key, part in each]
        for each in ([*ours.named_parameters()], [*theirs.named_parameters()])
    ]
    assert found[0] == found[1]
    assert {dtype for key, dtype, *_ in found[0] if "norm" in key or "embed" in key} == {
        torch.float32
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_takes_what_it_takes_after_pefts_function(name):
    step = step_of(name, kbit=True)
    real = taken(by_peft(step_of(name)), step)
    assert measured(step).peak == plan_model_step(step, "cpu").peak == real.peak
    plain = plan_model_step(step_of(name, checkpointing=True), "cpu")
    assert real.at_peak["parameters"] > plain.at_peak["parameters"]


def test_it_is_for_weights_in_4_bits():
    with pytest.raises(ValueError, match="kbit=True prepares weights in 4 bits"):
        ModelStep(CONFIGS["llama"], kbit=True)
