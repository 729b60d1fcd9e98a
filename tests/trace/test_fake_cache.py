"""What PyTorch remembers of operations on tensors without values, by this package's own key."""

import pytest
import torch
from transformers import LlamaConfig

from tests.small import configured
from tight_fit.models.step import ModelStep
from tight_fit.plans import model
from tight_fit.plans.trace_line import equal
from tight_fit.trace.fake_mode import RememberingMode

CONFIG = configured(LlamaConfig, 64, 2, 4, 128, 96, num_key_value_heads=2)
STEP = {"checkpointing": True, "loss": "chunked", "lora_rank": 2, "optimizer": "adamw8bit"}
HALF = {"precision": "fp16", "accumulation": 2, "offload": "activations"}


@pytest.mark.parametrize("fields", [STEP, HALF], ids=str)
def test_a_trace_is_the_same_where_nothing_is_remembered(fields, monkeypatch):
    step = ModelStep(CONFIG, batch_size=4, length=16, **fields)
    first, again = (model.trace_model_step(step) for _ in range(2))
    monkeypatch.setattr(RememberingMode, "_cached_dispatch_impl", RememberingMode._dispatch_impl)
    anew = model.trace_model_step(step)
    assert equal(first, again) and equal(anew, again)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(torch.bfloat16),
        lambda x: x.T,
        lambda x: x[1:],
        lambda x: x.expand(3, 6, 6),
        lambda x: x.detach().requires_grad_(),
        lambda x: x.to(torch.complex64).conj(),
    ],
)
def test_operations_on_what_differs_are_told_apart(change):
    """Each twice, so that the second is remembered, against tensors with values."""
    reals = [torch.zeros(6, 6), change(torch.zeros(6, 6))]
    known = [facts(real) for real in reals]
    with RememberingMode():
        fakes = [torch.zeros(6, 6), change(torch.zeros(6, 6))]
        made = [facts(fake) for fake in fakes * 2]
    assert made == known * 2


def facts(tensor):
    """Shape, strides and more of what two operations make of a tensor."""
    return [
        (made.shape, made.stride(), made.dtype, made.requires_grad, made.is_conj())
        for made in (tensor + 1, tensor.mT * 2.0)
    ]
