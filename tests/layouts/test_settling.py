"""The step before the one that is traced: it is short, and makes all that stays."""

import pytest
from transformers import LlamaConfig

from tests.layouts.few_layers import same
from tests.small import configured
from tight_fit.layouts import trace
from tight_fit.layouts.plan import plan_layout

CONFIG = configured(LlamaConfig, 32, 6, 4, 48, 64, num_key_value_heads=2)
FIELDS = {"batch_size": 8, "length": 16, "accumulation": 2}


def planned(monkeypatch, layout, settle, **fields):
    with monkeypatch.context() as patched:
        patched.setattr(trace, "settle", settle)
        return plan_layout(CONFIG, layout, **FIELDS | fields)


@pytest.mark.parametrize(
    "layout, fields",
    [("fsdp=4", {}), ("fsdp=2", {"precision": "fp16", "checkpointing": True}), ("zero2=4", {}),
     ("zero1=2", {}), ("hsdp=2x2", {"selective": True}), ("fsdp=2,tensor=2", {}),
     ("fsdp=2,context=2", {})],
)  # fmt: skip
def test_what_stays_is_there_after_one_short_step(monkeypatch, layout, fields):
    """Two steps of two micro-batches each, and an update of all layers before, change nothing."""
    settle = trace.settle

    def long(rank, make_batch, count):
        trace.give_gradients(rank.module.parameters())
        rank.optimizer.step()
        rank.module.zero_grad(set_to_none=True)
        for _ in range(2):
            settle(rank, make_batch, 2)

    short = planned(monkeypatch, layout, settle, **fields)
    assert same(short, planned(monkeypatch, layout, long, **fields))
    if layout == "fsdp=4":
        unsettled = planned(monkeypatch, layout, lambda rank, make_batch, count: None, **fields)
        assert not same(short, unsettled)
