"""Ways to spread one fine-tune over several GPUs, by plan: memory, messages and time."""

from __future__ import annotations

from collections.abc import Mapping

from helpers.parallel.layout import Parallel
from helpers.recipe import Recipe
from helpers.strategy.candidate import Candidate
from helpers.strategy.plan_cache import planned
from helpers.tables import Table
from tight_fit.layouts.cluster import Cluster
from tight_fit.units import size, span


def layouts(
    job: Recipe, named: Mapping[str, Parallel | tuple[Parallel, Recipe]], cluster: Cluster
) -> Table:
    """A row per layout: memory and messages of one GPU, and the planned time of a step.

    job      the recipe: its batch size is that of all GPUs together
    named    {label: a layout, or a pair of a layout and a recipe that replaces the job}
    cluster  the GPUs and the links between them
    Nothing is run. A row that does not fit says by how much. Raises
    ValueError for a layout that the cluster or the recipe cannot have.
    """
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
