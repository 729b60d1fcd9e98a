"""The search of a layout: which way to lay a step over GPUs is the fastest that fits?

Of each layout with each recomputation the fewest micro-batches that fit are taken: more never make
a step faster. Of pipelines, whose bubble they shorten, all numbers are tried. What cannot fit or
cannot win by arithmetic (`search.space`) is not planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from tight_fit.checks import of_type, one_of
from tight_fit.gpus.specs import find_gpu
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.open_ranks import OpenRanks
from tight_fit.layouts.plan import LayoutPlan, plan_step
from tight_fit.layouts.rank import local_step
from tight_fit.layouts.tensor import check_decoder
from tight_fit.models.made import empty
from tight_fit.models.step import ModelStep
from tight_fit.search.experts import NO_EXPERTS, Experts
from tight_fit.search.space import (
    RECOMPUTED,
    TIE,
    Reference,
    Trial,
    accumulations,
    layouts_of,
    least_need,
    least_need_beside,
    least_seconds,
    reference_layout,
)
from tight_fit.trace.fake_mode import FakeTensorMode

MOST_PLANS = 32  # of one search; what comes after them is left out, and said to be


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that was planned: `facts` as `layouts.facts.facts_of` gives them."""

    trial: Trial
    facts: Facts

    @property
    def fits(self) -> bool:
        return self.facts["fits"]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.facts["seconds"]

    @property
    def over(self) -> int:
        """Bytes needed beyond the GPU's memory; negative where there is room."""
        return self.facts["need"] - self.facts["card_memory"]


@dataclass
class Searched:
    """What a search found.

    job, cluster  what was asked
    planned   every trial that was planned, in the order of planning
    slower    {trial: seconds that it takes at the least}, of those that could not win
    too_large {trial: bytes at the least that are missing}, of those that could not fit: of each
              layout and recomputation the trial with the most micro-batches
    left_out  {what: why it cannot be planned, in a sentence}; "expert ranks" are all such layouts
    bounded   trials that were not looked at because of `MOST_PLANS`
    """

    job: ModelStep
    cluster: Cluster
    planned: list[PlannedTrial] = field(default_factory=list)
    slower: dict[Trial, float] = field(default_factory=dict)
    too_large: dict[Trial, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    bounded: list[Trial] = field(default_factory=list)

    @property
    def ranked(self) -> list[PlannedTrial]:
        """The planned trials that fit. Those within `TIE` of the fastest come first, the simplest
        of them on top; the others follow by their time."""
        fit = [one for one in self.planned if one.fits]
        limit = (1 + TIE) * self.fastest

        def key(one: PlannedTrial) -> tuple:
            tied = one.seconds <= limit
            return (not tied, one.trial.simplicity if tied else (), one.seconds)

        return sorted(fit, key=key)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest that fits, infinity where nothing does."""
        return min((one.seconds for one in self.planned if one.fits), default=inf)

    @property
    def best(self) -> PlannedTrial | None:
        """The first of `ranked`, None where nothing fits."""
        return next(iter(self.ranked), None)

    @property
    def runner_up(self) -> PlannedTrial | None:
        """The next with another layout; with the same one where there is no other."""
        best, others = self.best, self.ranked[1:]
        apart = [one for one in others if best and one.trial.layout != best.trial.layout]
        return next(iter([*apart, *others]), None)

    def cannot_win(self, trial: Trial, seconds: float) -> bool:
        """Whether a trial that takes so many seconds at the least cannot become the best."""
        best = self.best
        if best is None:
            return False
        if trial.simplicity < best.trial.simplicity:
            return seconds > (1 + TIE) * self.fastest
        return seconds >= best.seconds / (1 + TIE)


def search_layouts(
    job: ModelStep,
    cluster: Cluster,
    recompute: Iterable[str] = RECOMPUTED,
    accumulation: int | None = None,
    reduce: str = "fp32",
    tell: Callable[[str], object] = lambda words: None,
    bounds: bool = True,
) -> Searched:
    """Search the layouts of a step for the one that takes the least time of those that fit.

    >>> from tight_fit import Cluster, ModelStep, search_layouts
    >>> step = ModelStep.of("distilgpt2", batch_size=64, length=256, precision="bf16")
    >>> pair = Cluster("RTX 3060", per_machine=2)
    >>> found = search_layouts(step, pair, recompute=["none"], accumulation=1)
    >>> print(found.best.trial)
    zero1=2

    job           its `batch_size` counts the examples of all GPUs; its own accumulation and
                  checkpointing are replaced by those that are tried
    recompute     which recomputations to try, of `space.RECOMPUTED`
    accumulation  the only number of micro-batches to try; None tries all that divide
    reduce        dtype in which FSDP2 sums gradients
    tell          is called with what is being planned, in words
    bounds        False plans every trial until its layout fits, which takes long
    Raises TypeError or ValueError, in one sentence: for a GPU of unknown speed or without the
    step's arithmetic, and where no layout at all can be planned.
    """
    of_type("job", job, ModelStep)
    of_type("cluster", cluster, Cluster)
    recompute = tuple(recompute)
    for kind in recompute:
        one_of("recompute", kind, RECOMPUTED)
    find_gpu(cluster.gpu).peak(job.precision)  # or its error
    work = _Work(Searched(job, cluster), reduce, tell, bounds)
    with work.ranks:
        work.fill(recompute, accumulation)
        if bounds:
            work.plan_references(recompute)
        work.until_decided()
    found = work.found
    if not (found.planned or found.too_large or found.slower):
        *_, why = found.left_out.values() or ["nothing is left to try."]
        raise ValueError(f"No layout of {cluster.gpus} GPUs can be planned: {why}")
    return found


Family = tuple[Layout, str, int]  # of trials that differ in their micro-batches only


def family_of(trial: Trial) -> Family:
    """The trials of which the first that fits is the best; in a pipeline each is alone, as more
    micro-batches shorten the bubble."""
    alone = trial.accumulation if trial.layout.pipeline > 1 else 0
    return trial.layout, trial.recompute, alone


class _Work:
    """The search at work: `open` holds, of each family that is not decided yet, the trials that are
    left, the one with the fewest micro-batches first."""

    def __init__(self, found: Searched, reduce: str, tell: Callable[[str], object], bounds: bool):
        self.found, self.reduce, self.tell, self.bounds = found, reduce, tell, bounds
        self.job, self.cluster = found.job, found.cluster
        self.open: dict[Family, list[Trial]] = {}
        self.references: dict[str, Reference] = {}
        self.experts = NO_EXPERTS
        self.ranks = OpenRanks()
        self.made = 0

    def fill(self, recompute: Iterable[str], accumulation: int | None) -> None:
        """Fill `open` with what can be tried."""
        try:
            self.experts = Experts.of(self.job) if self.cluster.gpus > 1 else NO_EXPERTS
        except ValueError as error:
            self.found.left_out["expert ranks"] = str(error)
        for layout in layouts_of(self.cluster, self.experts.number):
            numbers = accumulations(layout, self.job, self.cluster.gpus, accumulation)
            try:
                first = numbers[0] if layout.pipeline > 1 and numbers else 1
                if layout.pipeline == 1 or numbers:
                    local_step(Trial(layout, "none", first).step(self.job), layout)
                if layout.tensor > 1:
                    self._check_tensor(layout)
            except ValueError as error:
                self.found.left_out[str(Trial(layout))] = str(error)
                continue
            if not numbers and layout.pipeline > 1:
                self.found.left_out[str(Trial(layout))] = (
                    f"A pipeline takes {layout.pipeline} to {4 * layout.pipeline} micro-batches, "
                    f"and none of these divides the {self.job.batch_size // layout.data} examples "
                    "of a data rank."
                )
            elif not numbers and accumulation is not None:
                self.found.left_out[str(Trial(layout))] = (
                    f"With {accumulation} micro-batches it is no layout of its own, or its "
                    f"{self.job.batch_size // layout.data} examples per rank cannot be divided."
                )
            for kind in recompute:
                for number in numbers:
                    trial = Trial(layout, kind, number)
                    self.open.setdefault(family_of(trial), []).append(trial)

    def _check_tensor(self, layout: Layout) -> None:
        check_decoder(self._model, layout.tensor, self.job.tokens or 1)

    @cached_property
    def _model(self) -> Any:
        """The job's model without values, which is only looked at."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            return empty(self.job).model

    def plan_references(self, recompute: Iterable[str]) -> None:
        """Plan what bounds are taken from. A model that FSDP2 does not take has none; nor has one
        of whose weights only some train, as the arithmetic is that of all."""
        if self.job.lora_rank is not None or self.job.frozen is not None:
            return
        layout = reference_layout(self.job, self.cluster.gpus)
        for kind in recompute:
            trial = Trial(layout, kind)
            try:
                planned = self._planned(trial)
            except ValueError:  # told where the trial itself is planned
                continue
            self.references[kind] = Reference.of(planned, self.cluster.gpu, self.experts)
            if trial in self.open.get(family_of(trial), ())[:1]:
                self._take(family_of(trial), planned)

    def until_decided(self) -> None:
        """Plan what may win, the most promising first; then a runner-up of another layout."""
        hopeless: dict[Family, list[Trial]] = {}
        while self.open:
            family = min(self.open, key=lambda family: self._order(self.open[family][0]))
            if self._all_too_large(family):
                continue
            trial = self.open[family][0]
            if self.bounds and self.found.cannot_win(trial, self._least_seconds(trial)):
                hopeless[family] = self.open.pop(family)
            elif self.made >= MOST_PLANS:
                self.found.bounded.append(trial)
                del self.open[family]
            else:
                self._try(family)
        for family in sorted(hopeless, key=lambda family: self._order(hopeless[family][0])):
            self.open[family] = hopeless[family]
            while family in self.open and self._needs_runner_up(family[0]):
                if not self._all_too_large(family):
                    self._try(family)
            for trial in self.open.pop(family, ())[:1]:
                self.found.slower[trial] = self._least_seconds(trial)

    def _needs_runner_up(self, layout: Layout) -> bool:
        """Whether all that fits so far has one layout, and this is another."""
        layouts = {one.trial.layout for one in self.found.ranked}
        return len(layouts) == 1 and layout not in layouts and self.made < MOST_PLANS

    def _order(self, trial: Trial) -> tuple:
        return self._least_seconds(trial), trial.simplicity

    def _least_seconds(self, trial: Trial) -> float:
        """By arithmetic, and no less than with less recomputation or with fewer micro-batches."""
        like = self.references.get(trial.recompute)
        if like is None:
            return 0.0
        easier = [one.seconds for one in self.found.planned if trial.adds_work_to(one.trial)]
        return max([least_seconds(trial, self.job, like, self.cluster, self.reduce), *easier])

    def _all_too_large(self, family: Family) -> bool:
        """Leave out the first trials of a family that cannot fit; whether none is left then."""
        trials, memory = self.open[family], self.cluster.gpu.memory
        while trials and self.bounds and (need := self._least_need(trials[0])) > memory:
            trial = trials.pop(0)
            if not trials:
                self.found.too_large[trial] = need - memory
        if not trials:
            del self.open[family]
        return not trials

    def _planned_of(self, family: Family) -> list[PlannedTrial]:
        return [one for one in self.found.planned if family_of(one.trial) == family]

    def _least_need(self, trial: Trial) -> float:
        like = self.references.get(trial.recompute)
        need = 0.0 if like is None else least_need(trial, self.job, like, self.cluster, self.reduce)
        for one in self._planned_of(family_of(trial)):
            if one.trial.accumulation > 1:  # with one there are no gradients beside activations
                beside = least_need_beside(one.facts["at_peak"], one.trial, trial, self.cluster)
                need = max(need, beside)
        return need

    def _try(self, family: Family) -> None:
        """Plan the first trial of a family."""
        trial = self.open[family][0]
        try:
            planned = self._planned(trial)
        except ValueError as error:
            self.found.left_out[str(trial)] = str(error)
            del self.open[family]
        else:
            self._take(family, planned)

    def _planned(self, trial: Trial) -> LayoutPlan:
        self.made += 1
        self.tell(f"planning {trial}, number {self.made}")
        step, selective = trial.step(self.job), trial.recompute == "selective"
        return plan_step(
            step, trial.layout, selective=selective, reduce=self.reduce, ranks=self.ranks
        )

    def _take(self, family: Family, planned: LayoutPlan) -> None:
        """Note the plan of the first trial of a family."""
        one = PlannedTrial(self.open[family].pop(0), facts_of(planned, self.cluster))
        self.found.planned.append(one)
        if one.fits or not self.open[family]:
            del self.open[family]
