"""Planned ranks beside real ones, and plans that trace a few layers beside those of every one."""

import json

import numpy as np

from tests.forked import forked, results
from tests.ranks.laid_out import CONFIGURATIONS
from tight_fit.layouts import plan as planner
from tight_fit.layouts.messages import SentMessage
from tight_fit.models.step import ModelStep


def on_ranks(cases, ranks):
    """(case, its step, the plan of the rank, what the rank found, words for it) of every real rank.

    A case is (fields of the step, layout, model, selective recomputation). Weights after two steps
    are looked at against the single process's, messages and FLOPs against the plan.
    """
    asked = [(fields, vars(layout), kind, some) for fields, layout, kind, some in cases]
    found = results(forked("tests/ranks/laid_out.py", json.dumps(asked), ranks=ranks, timeout=500))
    assert len(found) == ranks * len(cases)
    plans = {}
    for real in found:
        fields, layout, kind, selective = case = cases[real["case"]]
        checkpointing = selective or fields.get("checkpointing", False)
        step = ModelStep(CONFIGURATIONS[kind], **fields | {"checkpointing": checkpointing})
        rank = real["rank"] if layout.context > 1 else None  # the same for all ranks elsewhere
        key = real["case"], rank
        if key not in plans:
            plans[key] = planner.plan_step(step, layout, "cpu", selective, rank=rank)
        planned = plans[key].stages[real["stage"]] if layout.pipeline > 1 else plans[key]
        at = f"{kind}, {layout}, {layout.schedule}, rank {real['rank']}"
        # Two steps of AdamW move a weight by 4e-5, so that a gradient left out shows in fp32.
        assert real["distance"] < (1e-5 if step.precision == "fp32" else 1e-4), at
        assert tuple(SentMessage(**message) for message in real["sent"]) == planned.sent, at
        assert real["flops"] == planned.flops, at
        yield case, step, planned, real, at


def few_and_every(monkeypatch, config, layout, **fields):
    """The plan of a few layers and the plan of all, after a look that they are equal."""
    traced = []
    whole = planner.RepeatedLayers.whole
    monkeypatch.setattr(
        planner.RepeatedLayers, "whole", lambda *given: traced.append(1) or whole(*given)
    )
    few, every = (
        planner.plan_layout(config, layout, all_layers=all_layers, length=32, **fields)
        for all_layers in (False, True)
    )
    assert traced == [1] and same(few, every)
    return few, every


def same(one, other):
    """Whether two plans are equal: events, operations and messages in order."""
    facts = ("sent", "flops", "largest_tensors")
    return (
        all(getattr(one, name) == getattr(other, name) for name in facts)
        and np.array_equal(one.timeline, other.timeline)
        and np.array_equal(one.streams, other.streams)
        and list(issued(one)) == list(issued(other))
    )


def issued(planned):
    """The operations in the order in which they are issued, each with its phase."""
    for index, phase in planned.operations.issued():
        yield planned.operations.ops[index], phase
