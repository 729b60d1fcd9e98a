"""Plans of layouts, kept: a full-size plan of many ranks takes five to ten seconds, and a choice needs a dozen.

docs/choices.json holds those of notebook 18, made by `python -m helpers.strategy`; what is not in it is planned when asked
for. A plan depends on no card and on no link, so one kept plan answers for all of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from helpers.memory.timeline import Plan
from helpers.memory.tracker import CATEGORIES, OPTIMIZER
from helpers.parallel.comm_meter import SentMessage
from helpers.parallel.layout import Parallel
from helpers.plan.planner import plan, plan_key
from helpers.recipe import Recipe, difference
from helpers.strategy.plan_ranks import ParallelPlan, plan_parallel

FILE = Path(__file__).parents[2] / "docs" / "choices.json"
_made: dict[tuple[Recipe, Parallel], tuple[RankSummary, ...]] = {}  # in this process


@dataclass(frozen=True)
class RankSummary:
    """What a choice needs of the plan of a rank: the fields of `Plan` and `RankPlan` of these names, and

    without_states  bytes at the peak if the optimizer's states were elsewhere
    gradients       bytes of all gradients
    """

    at_peak: dict[str, int]
    peak_phase: str
    flops: dict[str, int]
    parameters: int
    without_states: int
    gradients: int
    overhead: int
    sent: tuple[SentMessage, ...] = ()

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())

    fits = Plan.fits


def summarize(made: Plan) -> RankSummary:
    """The part of a plan that is kept."""
    rest = made.timeline.sum(axis=1) - made.timeline[:, OPTIMIZER]
    return RankSummary(
        made.at_peak,
        made.peak_phase,
        dict(made.flops),
        made.parameters,
        int(rest.max()),
        made.highest["gradients"],
        made.overhead,
        tuple(getattr(made, "sent", ())),
    )


def planned(recipe: Recipe, parallel: Parallel = Parallel()) -> ParallelPlan:
    """The plan of a layout for a GPU, kept or made now: its `ranks` are `Stage`s. Raises ValueError where recipe and layout
    do not go together."""
    parallel.local(recipe)
    key = plan_key(recipe), parallel
    stages = _read().get(key) or _made.get(key)
    if stages is None:
        stages = _made[key] = make(*key)
    return ParallelPlan(recipe, parallel, "cuda", stages)


def is_kept(recipe: Recipe, parallel: Parallel = Parallel()) -> bool:
    """Whether `planned` takes no time."""
    key = plan_key(recipe), parallel
    return key in _read() or key in _made


def make(recipe: Recipe, parallel: Parallel) -> tuple[RankSummary, ...]:
    """Plan it now. A plan of one card is the plain planner's."""
    if parallel.ranks == 1:
        return (summarize(plan(recipe)),)
    return tuple(summarize(rank) for rank in plan_parallel(recipe, parallel).ranks)


def pack(recipe: Recipe, parallel: Parallel, stages: tuple[RankSummary, ...]) -> dict:
    """A plan as it is kept: fields that differ from the defaults, figures, and messages as (which, how many in a row)."""
    rows = []
    for one in stages:
        kinds = list(dict.fromkeys(one.sent))
        order = [[kinds.index(message), len(list(some))] for message, some in groupby(one.sent)]
        rows.append(
            [
                [one.at_peak[name] for name in CATEGORIES],
                one.peak_phase,
                one.flops,
                one.parameters,
                one.without_states,
                one.gradients,
                one.overhead,
                [list(asdict(kind).values()) for kind in kinds],
                order,
            ]
        )
    changed = {name: value for name, (_, value) in difference(plan_key(Recipe()), recipe).items()}
    laid = {
        name: value
        for name, value in asdict(parallel).items()
        if value != getattr(Parallel(), name)
    }
    return {"recipe": changed, "parallel": laid, "stages": rows}


def unpack(kept: dict) -> tuple[Recipe, Parallel, tuple[RankSummary, ...]]:
    """The reverse of `pack`."""
    stages = []
    for at_peak, phase, flops, parameters, without, gradients, overhead, kinds, order in kept[
        "stages"
    ]:
        sent = tuple(
            message for which, count in order for message in [SentMessage(*kinds[which])] * count
        )
        stages.append(
            RankSummary(
                dict(zip(CATEGORIES, at_peak)),
                phase,
                flops,
                parameters,
                without,
                gradients,
                overhead,
                sent,
            )
        )
    return (
        replace(plan_key(Recipe()), **kept["recipe"]),
        Parallel(**kept["parallel"]),
        tuple(stages),
    )


def write() -> None:
    """Keep every plan made in this process, and those kept before that were not forgotten."""
    found = _read() | _made
    rows = [json.dumps(pack(*key, stages), separators=(",", ":")) for key, stages in found.items()]
    FILE.write_text("[\n" + ",\n".join(sorted(rows)) + "\n]\n", encoding="utf8")


def forget() -> None:
    """From here on in this process as if nothing were kept."""
    _made.clear()
    _read().clear()


def read() -> list[dict]:
    return json.loads(FILE.read_text(encoding="utf8")) if FILE.exists() else []


@lru_cache(maxsize=1)
def _read() -> dict[tuple[Recipe, Parallel], tuple[RankSummary, ...]]:
    return {(recipe, parallel): stages for recipe, parallel, stages in map(unpack, read())}
