"""Plans that are kept: planning takes seconds, and a notebook needs dozens of plans.

The files of `FILES` hold the summaries (`PlanSummary`) of plans for one GPU, each under its recipe.
`make plans` (`python -m helpers.plan`) makes them all anew. A plan that is not among them is made
when it is asked for, and remembered until the process ends.

A plan depends on no GPU, so a kept plan answers for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from helpers.plan.plan_summary import PlanSummary, summarize
from helpers.plan.planner import plan, plan_key
from helpers.recipe import Recipe, difference
from tight_fit.files import replace_all

FOLDER = Path(__file__).parent / "plans"
FILES = ("ladder", "techniques")


class PlanCache:
    """Summaries of plans by recipe: those of the files, and those made in this process.

    folder  holds the files, which are read when the first plan is asked for
    """

    def __init__(self, folder: Path = FOLDER):
        self.folder = folder
        self._made: dict[Recipe, PlanSummary] = {}
        self._kept: dict[Recipe, PlanSummary] | None = None

    def find(self, key: Recipe) -> PlanSummary | None:
        """The summary of a plan, None where it is not there.

        key  the recipe as `plan_key` gives it
        """
        if self._kept is None:
            self._kept = {}
            for name in FILES:
                self._kept |= read(self.folder / f"{name}.json")
        return self._made.get(key) or self._kept.get(key)

    def add(self, key: Recipe, summary: PlanSummary) -> None:
        """Remember a plan in this process."""
        self._made[key] = summary

    def forget(self) -> None:
        """Behave from here on as if nothing had been made or kept."""
        self._made, self._kept = {}, {}

    def write(self, name: str) -> Path:
        """Write what was made since `forget` to the file `name`.json, and return its path."""
        path = self.folder / f"{name}.json"
        replace_all(self.folder, {path.name: to_json(self._made)})
        return path


CACHE = PlanCache()


def planned(recipe: Recipe) -> PlanSummary:
    """The plan of a recipe on one GPU, kept or made now."""
    key = plan_key(recipe)
    summary = CACHE.find(key)
    if summary is None:
        summary = make(key)
        CACHE.add(key, summary)
    return replace(summary, recipe=recipe)


def make(recipe: Recipe) -> PlanSummary:
    """Plan a recipe now."""
    return summarize(recipe, plan(recipe))


def read(path: Path) -> dict[Recipe, PlanSummary]:
    """The plans of one file; none where there is no file."""
    entries = json.loads(path.read_text(encoding="utf8")) if path.exists() else []
    plans = {}
    for entry in entries:
        recipe = replace(plan_key(Recipe()), **entry["recipe"])
        plans[recipe] = PlanSummary.from_dict(recipe, entry["plan"])
    return plans


def to_json(plans: Mapping[Recipe, PlanSummary]) -> str:
    """Plans as the text of a file, sorted; a recipe as the fields that are not default."""
    entries = [
        {
            "recipe": {
                name: new for name, (_, new) in difference(plan_key(Recipe()), recipe).items()
            },
            "plan": summary.to_dict(),
        }
        for recipe, summary in plans.items()
    ]
    entries.sort(key=lambda entry: json.dumps(entry["recipe"]))
    return json.dumps(entries, indent=1) + "\n"
