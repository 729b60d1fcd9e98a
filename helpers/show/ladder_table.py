"""The ladder of techniques, by kept plans: memory on each rung, and what each technique is worth.

The plans are of DeBERTa-v3-large with 16 examples of 512 tokens per step (`ladder.START`).
"""

from __future__ import annotations

from helpers.strategy import ladder
from helpers.strategy.plan_summary import PlanSummary
from helpers.tables import Table
from tight_fit.units import number, size


def rungs() -> Table:
    """A row per rung: what it changes, the peak, FLOPs, and the smallest GPU that holds it."""
    changes = ladder.rungs(ladder.START)
    plans = {name: ladder.planned(recipe) for name, recipe in ladder.climb(ladder.START).items()}
    first = plans[ladder.FIRST]
    rows = []
    for name, planned in plans.items():
        fields = ", ".join(f"{field}={value!r}" for field, value in changes[name].items())
        smallest = ladder.smallest(planned)
        rows.append(
            {
                "rung": name,
                "adds": fields or "(start)",
                "peak": size(planned.peak),
                "of the start": f"{planned.peak / first.peak:.0%}",
                "FLOPs per step": number(_flops(planned)),
                "smallest GPU": f"{smallest[0].name} in {smallest[1]}" if smallest else "none",
            }
        )
    return Table(rows, "Planned, nothing was run: DeBERTa-v3-large, 16 examples of 512 tokens")


def savings() -> Table:
    """A row per technique: what it saves alone, on its rung, and taken away from the top."""
    start, full = ladder.planned(ladder.START), ladder.planned(ladder.top(ladder.START))
    climbed = {name: ladder.planned(recipe) for name, recipe in ladder.climb(ladder.START).items()}
    below = dict(zip(list(climbed)[1:], climbed.values()))
    alone, without = ladder.alone(ladder.START), ladder.without(ladder.START)
    rows = []
    for name in without:
        away = ladder.planned(without[name])
        rows.append(
            {
                "technique": name,
                "alone": size(start.peak - ladder.planned(alone[name]).peak),
                "on its rung": size(below[name].peak - climbed[name].peak),
                "taken away": size(away.peak - full.peak),
                "FLOPs without it": f"{_flops(away) / _flops(full) - 1:+.0%}",
            }
        )
    return Table(rows, "Planned: bytes of the peak that each technique saves, asked in three ways")


def _flops(planned: PlanSummary) -> int:
    return sum(planned.flops.values())
