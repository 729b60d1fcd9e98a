"""Plans of layouts over several GPUs, kept: no reader of a lesson waits for them.

A plan of a pipeline of 8 billion parameters takes minutes, and so does a search of layouts. `make
plans` makes all that lessons ask anew (`tools.course.kept_plans`). A layout that is not kept is
planned when it is asked for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from functools import cache

from helpers.tables import KEPT_TABLES
from tight_fit.command.answer import attention_of
from tight_fit.command.question import digest
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of_step
from tight_fit.layouts.layout import Layout
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import KINDS

FILE = KEPT_TABLES.with_name("layouts.json")
COMPUTED = {
    "fp32": "computed in fp32 without TF32",
    "tf32": "computed in fp32 with TF32",
    "bf16": "computed in bf16",
    "fp16": "computed in fp16 with loss scaling",
}


def facts(job: ModelStep, layout: Layout, cluster: Cluster) -> Facts:
    """What `tight_fit.layouts.facts.facts_of_step` gives, planned now, or what is kept of it.

    job  its batch size is that of all GPUs
    Raises what `plan_step` raises.
    """
    found = _kept().get(key(job, layout, cluster))
    return found or facts_of_step(job, layout, cluster)


def key(job: ModelStep, layout: Layout, cluster: Cluster) -> str:
    """40 hexadecimal digits of all that an answer depends on, beside the planner itself.

    Fields of the step that are as usual are left out, so that a new one leaves keys as they are.
    """
    config = {**job.config.to_diff_dict(), "transformers_version": None}
    named = [one for one in fields(job) if one.name != "config"]
    step = {one.name: value for one in named if (value := getattr(job, one.name)) != one.default}
    return digest([config, step, asdict(layout), str(cluster)])


@cache
def _kept() -> dict[str, Facts]:
    return json.loads(FILE.read_text(encoding="utf8")) if FILE.exists() else {}


def in_words(job: ModelStep) -> str:
    """Weights, precision, optimizer, attention and recomputation of a step."""
    taken = attention_of(job)
    attention = f"{'fused (sdpa)' if taken == 'sdpa' else taken} attention"
    again = ", gradient checkpointing" if job.checkpointing else ""
    again += ", the loss in chunks" if job.loss == "chunked" else ""
    weights = f"{job.weights} weights, {COMPUTED[job.precision]}"
    return f"{weights}, {KINDS[job.optimizer].label}, {attention}{again}, not compiled"
