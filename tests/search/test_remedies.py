"""What would fit a GPU: what bounds tell without a plan changes no answer."""

import pytest
from transformers import BertConfig, LlamaConfig

from tests.small import configured
from tight_fit import gpus
from tight_fit.models import made
from tight_fit.models.config import CannotPlan
from tight_fit.models.step import ModelStep
from tight_fit.search.remedies import Remedies, least_in_chunks


def tiny(mebibytes: int, **fields) -> tuple[ModelStep, gpus.GPU]:
    """A step of 1.4 million parameters, and a GPU with so much room for tensors."""
    config = configured(LlamaConfig, 256, 2, 4, 512, 500, num_key_value_heads=2)
    memory = gpus.CONTEXT + 2 * gpus.WORKSPACE + mebibytes * 2**20
    step = ModelStep(config, batch_size=8, length=32, **fields)
    return step, gpus.GPU("Tiny", memory, (8, 9))


@pytest.mark.parametrize("mebibytes, fields", [(16, {}), (20, {"task": "dpo"})])
def test_what_bounds_leave_out_changes_no_answer(mebibytes, fields, monkeypatch):
    bounded, whole = (Remedies(*tiny(mebibytes, **fields)) for _ in range(2))
    found = bounded.changes(), bounded.largest_batch()
    monkeypatch.setattr(whole, "_surely_too_much", lambda change: False)
    assert (whole.changes(), whole.largest_batch()) == found
    assert bounded.planned < whole.planned


@pytest.mark.parametrize(
    "fields",
    [{"lora_rank": 4, "weights": "bf16"}, {"precision": "bf16"}, {"checkpointing": True}],
    ids=str,
)
def test_what_is_alive_before_the_logits_is_so_with_a_loss_in_chunks(fields):
    config = configured(LlamaConfig, 128, 6, 4, 512, 1000, num_key_value_heads=2)
    step = ModelStep(config, batch_size=8, length=64, **fields)
    remedies = Remedies(step, "T4")
    least, chunked = least_in_chunks(remedies.plan()), remedies.plan({"loss": "chunked"})
    share = 0.5 if fields.get("checkpointing") else 0.9
    assert share * chunked.peak < least <= chunked.peak


def test_several_changes_at_once_are_no_more_than_are_needed():
    """No field of them can be left out, and fewer micro-batches do not fit."""
    step = ModelStep(configured(BertConfig, 256, 2, 4, 512, 2000), batch_size=8, length=128)
    large = gpus.GPU("Tiny", 2**34, (7, 5))
    fit = Remedies(step, large).plan({"optimizer": "adamw8bit", "accumulation": 4}).fits(large)
    remedies = Remedies(step, gpus.GPU("Tiny", int(fit.need) + 1, large.capability))
    (change,) = remedies.changes()
    assert len(change) > 1 and 2 < change["accumulation"] < 8, "a GPU of another size shows it"
    assert remedies.fits(change) and not remedies.fits(change | {"accumulation": 2})
    for name in change:
        assert not remedies.fits({one: value for one, value in change.items() if one != name}), name


def test_a_change_that_the_model_refuses_is_left_out_of_several(monkeypatch):
    """Bounds take changes for granted until one is planned; then each is proven."""
    monkeypatch.setattr(made, "put_in_chunks", refused)
    changes = Remedies(*tiny(16)).changes()
    assert changes, "nothing fits: give the GPU more room, so that changes are compared"
    assert all(change and "loss" not in change for change in changes)


def refused(*_, **__):
    raise CannotPlan("This model has no loss in chunks.")
