"""Ways to spread one fine-tune over several GPUs, by plan: memory, messages and time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from helpers.recipe import Recipe
from helpers.strategy.candidate import Candidate
from helpers.strategy.plan_cache import planned
from helpers.strategy.show import OPTIMIZERS
from helpers.tables import Table
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.plan import LayoutPlan, plan_step
from tight_fit.models.step import ModelStep
from tight_fit.units import size, span

COMPUTED = {
    "fp32": "computed in fp32 without TF32",
    "tf32": "computed in fp32 with TF32",
    "bf16": "computed in bf16",
    "fp16": "computed in fp16 with loss scaling",
}


def layouts(job: Recipe | ModelStep, named: Mapping[str, Any], cluster: Cluster) -> Table:
    """A row per layout: memory and messages of one GPU, and the planned time of a step.

    job      the step, of a model of transformers or a recipe: its batch size is that of all GPUs
    named    {label: a `Layout`}; of a recipe {label: a `Parallel`, or a pair of one and a recipe
             that replaces the job}
    cluster  the GPUs and the links between them
    Nothing is run. A row that does not fit says by how much. Raises
    ValueError for a layout that the cluster or the step cannot have.
    """
    if isinstance(job, ModelStep):
        rows = [_row_of_step(label, job, layout, cluster) for label, layout in named.items()]
        return Table(rows, f"Planned, nothing was run: {cluster}; {in_words(job)}.")
    rows = []
    for label, entry in named.items():
        layout, recipe = entry if isinstance(entry, tuple) else (entry, job)
        candidate = Candidate(recipe, cluster, planned(recipe, layout))
        sent = sum(candidate.plan.bytes_by_collective.values())
        rows.append(
            {
                "layout": label,
                "memory per GPU": size(candidate.peak),
                "fits": "yes" if candidate.fit else f"no, {size(candidate.fit.over)} too much",
                "sent per GPU and step": size(sent) if sent else "nothing",
                "time per step": span(candidate.time.total),
                "examples per second": f"{candidate.examples_per_second:.0f}",
            }
        )
    return Table(rows, f"Planned, nothing was run: {cluster}.")


def in_words(job: ModelStep) -> str:
    """Weights, precision, optimizer, attention and recomputation of a step."""
    attention = f"{job.attention or 'fused (sdpa)'} attention"
    again = ", gradient checkpointing" if job.checkpointing else ""
    weights = f"{job.weights} weights, {COMPUTED[job.precision]}"
    return f"{weights}, {OPTIMIZERS[job.optimizer]}, {attention}{again}"


def _row_of_step(label: str, job: ModelStep, layout: Layout, cluster: Cluster) -> dict[str, str]:
    facts = facts_of(_planned(repr(job.config), job, layout), cluster)
    sent = sum(sum(kinds.values()) for kinds in facts["sent"].values())
    over = facts["need"] - facts["card_memory"]
    return {
        "layout": label,
        "need per GPU": size(facts["need"]),
        "fits": "yes" if facts["fits"] else f"no, {size(over)} too much",
        "sent per GPU and step": size(sent) if sent else "nothing",
        "time per step": span(facts["seconds"]),
        "tokens per second": f"{facts['tokens_per_second']:,.0f}",
    }


@lru_cache(maxsize=64)
def _planned(config: str, job: ModelStep, layout: Layout) -> LayoutPlan:
    """A plan depends on no GPU and on no link. The configuration does not count when two steps are
    compared, and so its text is a key of its own."""
    return plan_step(job, layout)
