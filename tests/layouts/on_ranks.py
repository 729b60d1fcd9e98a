"""Planned ranks beside real ones: what the tests of layouts, pipelines and experts begin with."""

import json

from tests.forked import forked, results
from tests.ranks.laid_out import CONFIGURATIONS
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.plan import plan_step
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
            plans[key] = plan_step(step, layout, "cpu", selective, rank=rank)
        planned = plans[key].stages[real["stage"]] if layout.pipeline > 1 else plans[key]
        at = f"{kind}, {layout}, {layout.schedule}, rank {real['rank']}"
        # Two steps of AdamW move a weight by 4e-5, so that a gradient left out shows in fp32.
        assert real["distance"] < (1e-5 if step.precision == "fp32" else 1e-4), at
        assert tuple(SentMessage(**message) for message in real["sent"]) == planned.sent, at
        assert real["flops"] == planned.flops, at
        yield case, step, planned, real, at
