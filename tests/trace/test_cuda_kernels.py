"""What the plan for a GPU claims of CUDA's kernels, against fake CUDA tensors: no GPU is needed.

The tensors are dispatched by torch itself. Only a PyTorch built with CUDA can make them (Linux's
default build; the CPU build that CI installs cannot). Without a driver such a PyTorch cannot run a
backward pass on them, so the forward pass is compared: all that it keeps.
"""

import pytest
import torch
import torch.nn.functional as F
import transformers.models.deberta_v2.modeling_deberta_v2 as deberta

from helpers import models
from helpers.plan import fake_batch, plan
from helpers.recipe import Recipe
from tight_fit.memory.plan import BLOCK
from tight_fit.techniques.step import loss_sum
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.storage_trace import ACTIVATIONS, BORN, DIES, MOVES, PARAMETERS, PHASES
from tight_fit.trace.tracker import Tracker, steady_memory

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="this PyTorch is built without CUDA"
)
TOLERANCE = 2e-4  # the attention kernels' statistics are padded and carry a seed; a CPU's are not


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
    """The kernel a GPU takes: without one, torch cannot choose."""
    if torch.is_autocast_enabled("cuda"):
        low = [tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value)]
        return torch.ops.aten._scaled_dot_product_flash_attention(*low, dropout_p, is_causal)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, dropout_p, is_causal
    )[0]


@pytest.mark.parametrize("model, examples", [("deberta", 16), ("vit", 32)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("lora_rank, checkpointing", [(None, False), (None, True), (8, False)])
def test_the_forward_pass_keeps_what_cuda_keeps(
    model, examples, precision, lora_rank, checkpointing, monkeypatch
):
    fields = {"precision": precision, "lora_rank": lora_rank, "checkpointing": checkpointing}
    recipe = Recipe(model, profile="full", batch_size=examples, **fields)
    planned = plan(recipe, "cuda")
    end = int((planned.phases == PHASES.index("forward")).nonzero()[0][-1])
    expected = planned.timeline[end, ACTIVATIONS]

    # copies a number to the device, which needs one; the sizes are the same
    monkeypatch.setattr(deberta, "make_log_bucket_position", lambda where, *rest: where.clone())
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    tracker = Tracker()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            net = models.empty(recipe)
            batch = fake_batch(net, recipe)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # else autocast is off
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
        with steady_memory(), tracker:
            tracker.adopt([list(net.parameters()), list(net.buffers())], PARAMETERS)
            tracker.adopt(batch, ACTIVATIONS)
            loss = loss_sum(net, batch, recipe) / examples
            events = list(tracker.storage_trace.events)
    assert loss.device.type == "cuda"

    where = {}
    for kind, storage, category, _ in events:
        if kind in (BORN, MOVES):
            where[storage] = category
        elif kind == DIES:
            del where[storage]
    kept = [storage for storage, category in where.items() if category == ACTIVATIONS]
    blocks = [-(-tracker.storage_trace.bytes[one] // BLOCK["cuda"]) for one in kept]
    assert sum(blocks) * BLOCK["cuda"] == pytest.approx(expected, rel=TOLERANCE)
