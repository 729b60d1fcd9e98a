"""Plans that are kept: planning takes seconds, and a notebook needs dozens of plans.

The files helpers/strategy/plans/*.json hold the summaries (`PlanSummary`) of plans for a GPU, each
under its recipe and its layout. `make plans` (`python -m helpers.strategy`) makes them all anew. A
plan that is not among them is made when it is asked for, and remembered until the process ends.

A plan depends on no GPU and on no link, so a kept plan answers for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from helpers.parallel.layout import Parallel
from helpers.plan.planner import plan, plan_key
from helpers.recipe import Recipe, difference
from helpers.strategy.plan_ranks import ParallelPlan, plan_stages
from helpers.strategy.plan_summary import PlanSummary, summarize
from tight_fit.files import replace_all

FOLDER = Path(__file__).parent / "plans"
WIDTH = 120  # columns of a file, so that a message stands in one line
ALONE = Parallel()

Key = tuple[Recipe, Parallel]  # the recipe as `plan_key` gives it
Ranks = tuple[PlanSummary, ...]  # one for each stage of the pipeline


class PlanCache:
    """Summaries of plans by recipe and layout: those of the files, and those made in this process.

    folder  holds the files, which are read when the first plan is asked for
    """

    def __init__(self, folder: Path = FOLDER):
        self.folder = folder
        self._made: dict[Key, Ranks] = {}
        self._kept: dict[Key, Ranks] | None = None

    def find(self, key: Key) -> Ranks | None:
        """The summaries of a plan, None where it is not there."""
        if self._kept is None:
            self._kept = {}
            for path in sorted(self.folder.glob("*.json")):
                self._kept |= read(path)
        return self._made.get(key) or self._kept.get(key)

    def add(self, key: Key, ranks: Ranks) -> None:
        """Remember a plan in this process."""
        self._made[key] = ranks

    def forget(self) -> None:
        """Behave from here on as if nothing had been made or kept."""
        self._made, self._kept = {}, {}

    def write(self, name: str) -> Path:
        """Write what was made since `forget` to the file `name`.json, and return its path."""
        path = self.folder / f"{name}.json"
        replace_all(self.folder, {path.name: to_json(self._made)})
        return path


CACHE = PlanCache()


def planned(recipe: Recipe, parallel: Parallel = ALONE) -> ParallelPlan:
    """The plan of a layout for a GPU, kept or made now; its `ranks` are `PlanSummary`s.

    Raises ValueError where recipe and layout do not go together.
    """
    parallel.local(recipe)
    return ParallelPlan(recipe, parallel, "cuda", _ranks(recipe, parallel))


def planned_alone(recipe: Recipe) -> PlanSummary:
    """The plan of a recipe on one GPU, kept or made now."""
    return _ranks(recipe, ALONE)[0]


def _ranks(recipe: Recipe, parallel: Parallel) -> Ranks:
    key = plan_key(recipe), parallel
    ranks = CACHE.find(key)
    if ranks is None:
        ranks = make(*key)
        CACHE.add(key, ranks)
    return tuple(replace(rank, recipe=recipe) for rank in ranks)


def is_kept(recipe: Recipe, parallel: Parallel = ALONE) -> bool:
    """Whether `planned` needs no time for this plan."""
    return CACHE.find((plan_key(recipe), parallel)) is not None


def keep_bytes_only(recipe: Recipe) -> None:
    """Plan a recipe for one GPU, and remember what it takes without what its time follows from."""
    key = plan_key(recipe), ALONE
    if CACHE.find(key) is None:
        CACHE.add(key, (summarize(key[0], plan(recipe), timed=False),))


def make(recipe: Recipe, parallel: Parallel = ALONE) -> Ranks:
    """Plan a layout now. The plan of a single rank is the plain planner's."""
    if parallel.ranks == 1:
        return (summarize(recipe, plan(recipe)),)
    return tuple(summarize(recipe, rank, rank.sent) for rank in plan_stages(recipe, parallel))


def read(path: Path) -> dict[Key, Ranks]:
    """The plans of one file."""
    plans = {}
    for entry in json.loads(path.read_text(encoding="utf8")):
        recipe = replace(plan_key(Recipe()), **entry["recipe"])
        ranks = tuple(PlanSummary.from_dict(recipe, rank) for rank in entry["ranks"])
        plans[recipe, Parallel(**entry["parallel"])] = ranks
    return plans


def to_json(plans: Mapping[Key, Ranks]) -> str:
    """Plans as the text of a file, sorted; recipe and layout as the fields that are not default."""
    entries = [
        {
            "recipe": _changes(difference(plan_key(Recipe()), recipe)),
            "parallel": {
                name: value
                for name, value in asdict(parallel).items()
                if value != getattr(ALONE, name)
            },
            "ranks": [rank.to_dict() for rank in ranks],
        }
        for (recipe, parallel), ranks in plans.items()
    ]
    entries.sort(key=lambda entry: json.dumps([entry["recipe"], entry["parallel"]]))
    return pretty(entries) + "\n"


def _changes(difference: Mapping[str, tuple]) -> dict:
    return {name: new for name, (_, new) in difference.items()}


def pretty(value: object, indent: int = 0, key: str = "") -> str:
    """JSON in which all that fits into a line of `WIDTH` columns stands in one line.

    key  what precedes the value in its first line
    """
    line = key + json.dumps(value)
    if indent + len(line) < WIDTH or not isinstance(value, (dict, list)):  # a comma may follow
        return line
    if isinstance(value, dict):
        begin, end = "{}"
        parts = [pretty(part, indent + 1, f"{json.dumps(name)}: ") for name, part in value.items()]
    else:
        begin, end = "[]"
        parts = [pretty(part, indent + 1) for part in value]
    margin = "\n" + " " * (indent + 1)
    return key + begin + margin + f",{margin}".join(parts) + "\n" + " " * indent + end
