"""Which strategy for this job on these GPUs? Every candidate is planned; those that fit are ranked.

    choose(Recipe("deberta-large", profile="full", length=512, precision="bf16", batch_size=64),
           Cluster("A100-40GB", per_machine=8, inside="NVLink 3"), goal="time")

What notebook 18 asks for is at the end of this module; its plans are kept (`plan_cache`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from helpers import tables
from helpers.parallel import Parallel
from helpers.recipe import Recipe
from helpers.strategy import plan_cache
from helpers.strategy.candidate import Candidate, name_of
from helpers.strategy.candidates import Change, changes, hopeless, layouts
from tight_fit.checks import of_type, one_of
from tight_fit.gpus.specs import find_gpu
from tight_fit.layouts.cluster import Cluster
from tight_fit.search.space import TIE
from tight_fit.units import size, span

GOALS = ("time", "memory", "simplest")


@dataclass(frozen=True)
class Choice:
    """The candidates for a job on a cluster, ranked.

    candidates  those that fit come first
    left_out    {name of a candidate: why it was not planned}
    """

    job: Recipe
    cluster: Cluster
    goal: str
    candidates: list[Candidate]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The first candidate, None where nothing fits."""
        return self.candidates[0] if self.candidates and self.candidates[0].fit else None

    @property
    def runner_up(self) -> Candidate | None:
        """The next that fits after the best: with another layout, where there is one."""
        others = [one for one in self.candidates[1:] if one.fit]
        apart = [one for one in others if self.best and one.parallel != self.best.parallel]
        return next(iter([*apart, *others]), None)

    @property
    def answer(self) -> str:
        """A paragraph: the best, what it takes and why, then the runner-up and why it lost."""
        best, second = self.best, self.runner_up
        if best is None:
            nearest = self.candidates[0] if self.candidates else None
            why = f" Nearest is {nearest.name}: {nearest.reason}" if nearest else ""
            return f"Nothing fits {self.cluster}.{why}"
        words = (
            f"Take {best.name}: each GPU needs {size(best.fit.need)} of "
            f"{size(self.cluster.gpu.memory)}, context and margin included, and a step takes "
            f"{span(best.time.total)}, "
            f"{best.examples_per_second:.0f} examples per second. {best.reason}"
        )
        if second is None:
            return f"{words} Nothing else that was planned fits."
        return (
            f"{words} The runner-up is {second.name} ({span(second.time.total)}, "
            f"{size(second.fit.need)}): {self._why_it_lost(best, second)}."
        )

    def _why_it_lost(self, best: Candidate, second: Candidate) -> str:
        if best.same and not second.same:
            return "it learns something else than the job does"
        if self.goal == "memory":
            return f"its tensors take {size(second.peak)} per GPU in place of {size(best.peak)}"
        time = second.time.total / best.time.total - 1
        speed = f"it is {abs(time):.1%} {'slower' if time >= 0 else 'faster'}"
        if self.goal == "simplest" or second in self.ties:
            tied = f", within the {TIE:.0%} that a plan cannot tell apart,"
            tie = tied if second in self.ties else ""
            more = second.changes - best.changes
            if more:
                return f"{speed}{tie} and changes {more} more of the job"
            return f"{speed}{tie} and no simpler"
        return f"{speed}; {second.reason[0].lower()}{second.reason[1:-1]}"

    def candidate(self, name: str) -> Candidate:
        """The candidate of a name. Raises KeyError with the names there are."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        names = ", ".join(candidate.name for candidate in self.candidates)
        raise KeyError(f"No candidate is called {name!r}: there are {names}.")

    def table(self, reasons: bool = False, most: int | None = None) -> tables.Table:
        """A row per candidate, with its reason if asked for; `most` limits the number of rows."""
        rows = [
            {
                "": self._mark(candidate),
                "strategy": candidate.name,
                "per GPU": size(candidate.peak),
                "step": span(candidate.time.total),
                "examples/s": f"{candidate.examples_per_second:.0f}",
                "limited by": candidate.limit,
                **({"why": candidate.reason} if reasons else {}),
            }
            for candidate in self.candidates[:most]
        ]
        goal = self.goal if self.goal != "simplest" else "simplicity"
        tie = f"; ≈ within {TIE:.0%} of the fastest, the simplest first" if self.ties else ""
        return tables.Table(
            rows,
            f"Plan: {self.cluster}; sorted by {goal}, what learns something else last; "
            f"✗ does not fit{tie}",
        )

    @property
    def ties(self) -> list[Candidate]:
        """For the goal "time": the candidates that are as fast as the best as far as a plan can
        tell (`TIE`), the best, which is the simplest of them, left out."""
        if self.goal != "time" or not self.best:
            return []
        return [candidate for candidate in tied(self.candidates) if candidate is not self.best]

    def _mark(self, candidate: Candidate) -> str:
        if candidate is self.best:
            return "→"
        return ("≈" if candidate in self.ties else "") if candidate.fit else "✗"

    def __str__(self) -> str:
        return str(self.table(reasons=True))


def choose(job: Recipe, cluster: Cluster, goal: str = "time") -> Choice:
    """Rank what fits.

    Candidates that learn the same as the job come before those that do not (8-bit states, LoRA).
    Then counts the goal: "time" (seconds per step; within `TIE` of the fastest, the fewest
    changes), "memory" (bytes per GPU) or "simplest" (fewest changes). Each layout is tried with
    more and more accumulation (`accumulations`), and the first that will do stands for it. Changes
    of the recipe are tried only where the job as it is does not fit.

    Where plans are not kept, each candidate takes seconds. A candidate is not planned where
    arithmetic shows that it cannot fit or, for the goal "time", that it cannot be the fastest.
    Raises ValueError for an unknown goal, and for a precision that the GPU lacks, TypeError for
    what is no `Recipe` or no `Cluster`.
    """
    of_type("job", job, Recipe)
    of_type("cluster", cluster, Cluster)
    one_of("goal", goal, GOALS)
    find_gpu(cluster.gpu).peak(job.precision)  # or its error
    alone = plan_cache.planned(job)
    candidates: list[Candidate] = []
    left_out: dict[str, str] = {}
    for attempts in (layouts(job, cluster, goal), changes(job, cluster)):
        for change, parallel, offload in attempts:
            why: str | None = None
            try:
                recipe = replace(job, **change)
                if any(_will_do(candidate, recipe, parallel) for candidate in candidates):
                    continue  # with less accumulation
                if not plan_cache.is_kept(recipe, parallel):
                    why = hopeless(recipe, parallel, cluster, alone, candidates, goal, offload)
                if why is None:
                    cluster.links(parallel)
                    plan = plan_cache.planned(recipe, parallel)
                    candidates.append(Candidate(job, cluster, plan, offload))
            except (ValueError, ModuleNotFoundError) as error:  # no bitsandbytes: no 8-bit states
                why = str(error)
            if why is not None:
                changed = {name: new for name, new in change.items() if getattr(job, name) != new}
                left_out[name_of(changed, parallel, offload)] = why
        if any(candidate.fit for candidate in candidates):
            break
    return Choice(job, cluster, goal, ranked(candidates, goal), left_out)


def _will_do(candidate: Candidate, recipe: Recipe, parallel: Parallel) -> bool:
    """Whether a candidate makes an attempt with the same layout and more accumulation needless.

    Where nothing waits for other stages, more accumulation only costs time.
    """
    same = candidate.parallel == parallel and parallel.ranks > 1 and not candidate.offload
    if not (same and candidate.fit) or parallel.pipeline > 1:
        return False
    return replace(candidate.plan.recipe, accumulation=recipe.accumulation) == recipe


def tied(candidates: list[Candidate]) -> list[Candidate]:
    """Those within `TIE` of the fastest of all that fit and learn the same as the job."""
    fit = [candidate for candidate in candidates if candidate.fit and candidate.same]
    fastest = min((candidate.time.total for candidate in fit), default=0.0)
    return [candidate for candidate in fit if candidate.time.total <= (1 + TIE) * fastest]


def ranked(candidates: list[Candidate], goal: str) -> list[Candidate]:
    """Sorted: first what fits, then what learns the same, then by the goal, then by time.

    For the goal "time", those that tie for the first place are sorted by their number of changes.
    Those that do not fit are sorted by the bytes that are missing.
    """
    equal = tied(candidates) if goal == "time" else []

    def key(candidate: Candidate) -> tuple:
        values = {
            "time": candidate.time.total,
            "memory": candidate.peak,
            "simplest": candidate.changes,
        }
        return (
            not candidate.fit,
            0 if candidate.fit else candidate.fit.over,
            not candidate.same,
            candidate not in equal,
            candidate.changes if candidate in equal else values[goal],
            candidate.time.total,
        )

    return sorted(candidates, key=key)


LARGE = Recipe("deberta-large", profile="full", length=512, batch_size=16)
# What notebook 18 asks: {name: (job, cluster)}.
SCENARIOS = {
    "one T4": (replace(LARGE, precision="fp16"), Cluster("T4")),
    "two T4 GPUs": (replace(LARGE, model="deberta"), Cluster("T4", 2)),
    "two T4 GPUs, fp16": (replace(LARGE, precision="fp16"), Cluster("T4", 2)),
    "four RTX 3090": (
        replace(LARGE, precision="bf16", batch_size=32),
        Cluster("RTX 3090", 4, inside="PCIe 4 x16"),
    ),
    "one machine": (
        replace(LARGE, precision="bf16", batch_size=64),
        Cluster("A100-40GB", 8, inside="NVLink 3"),
    ),
    "slow links": (
        replace(LARGE, precision="bf16", batch_size=128),
        Cluster("A100-40GB", 8, machines=2, inside="NVLink 3", between="Ethernet 10 Gbit"),
    ),
    "fast links": (
        replace(LARGE, precision="bf16", batch_size=128),
        Cluster(
            "A100-40GB", 8, machines=2, inside="NVLink 3", between="InfiniBand 200 Gbit", cards=8
        ),
    ),
    "small GPUs": (replace(LARGE, batch_size=4, length=128), Cluster("GTX 1650", 4)),
    "mini": (Recipe("vit", batch_size=32), Cluster("T4", 2)),
    "images": (Recipe("vit", profile="full", batch_size=64), Cluster("T4", 2)),
}
# What notebook 19 lays out over two GPUs.
TWO_T4 = replace(LARGE, precision="fp16", padding="uniform", accumulation=4), Parallel(data=2)
# The values that the panel of notebook 18 offers.
TOGGLES: dict[str, tuple] = {
    "accumulation": (1, 4),
    "precision": ("fp32", "bf16"),
    "checkpointing": (False, True),
    "optimizer": ("adamw", "adamw8bit"),
    "lora_rank": (None, 8),
}


def toggled() -> Iterator[Recipe]:
    """Every recipe that the panel of notebook 18 can ask for, for one GPU."""
    for start in (SCENARIOS["images"][0], LARGE, replace(LARGE, model="deberta")):
        for values in itertools.product(*TOGGLES.values()):
            change: Change = dict(zip(TOGGLES, values))
            yield replace(start, **change)


def plan_everything() -> None:
    """Plan all that notebooks 18 and 19 show of layouts, some ten minutes where nothing is kept."""
    for (job, cluster), goal in itertools.product(SCENARIOS.values(), ("simplest", "memory")):
        choose(job, cluster, goal)  # the goal "time" would leave some out for these links only
    plan_cache.planned(*TWO_T4)
    for recipe in toggled():
        plan_cache.keep_bytes_only(recipe)
