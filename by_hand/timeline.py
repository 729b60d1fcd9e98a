"""Schedules of a pipeline played by hand, with times that one chooses or has measured.

    played = simulate(one_f_one_b(ranks=4, micro_batches=8), forward=1, backward=2)
    played.bubble, played.spans[0], played.schedule.held

Two schedules stand beside those that are planned (`tight_fit.layouts.schedules`): one micro-batch
at a time, and PipeDream, which has no flush.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tight_fit.checks import one_of, whole
from tight_fit.layouts.schedules import Action, Schedule, needs, one_f_one_b

WEIGHTS = ("latest", "stash", "vertical")


def naive(ranks: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time: one rank works, the others wait."""
    whole("ranks", ranks, 1)
    whole("micro_batches", micro_batches, 1)
    actions = [
        [Action(kind, m, rank) for m in range(micro_batches) for kind in "FB"]
        for rank in range(ranks)
    ]
    return Schedule("naive", ranks, micro_batches, tuple(map(tuple, actions)), ranks)


def pipedream(ranks: int, micro_batches: int, weights: str = "stash") -> Schedule:
    """1F1B without a flush (Narayanan et al. 2019).

    Every backward pass is followed by an optimizer step of its stage; `micro_batches` is the length
    of the whole stream. An action's `version` says which weights it uses:

    weights  "latest": what is there, so that F and B of one micro-batch differ;
             "stash": B uses the weights that its F used;
             "vertical": all stages use the version that the first stage had when the micro-batch
             entered
    """
    one_of("weights", weights, WEIGHTS)
    flushing = one_f_one_b(ranks, micro_batches)
    actions = []
    for rank, own in enumerate(flushing.actions):
        own_delay = ranks - 1 if weights == "vertical" else ranks - 1 - rank
        delay = {"F": own_delay, "B": 0 if weights == "latest" else own_delay}
        versions = [max(0, action.micro_batch - delay[action.kind]) for action in own]
        actions.append(
            tuple(action._replace(version=version) for action, version in zip(own, versions))
        )
    return replace(flushing, name=f"PipeDream, {weights}", actions=tuple(actions))


class Span(NamedTuple):
    """An action and its time, in the units of the durations: seconds where it was measured."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule played, or measured: spans[rank] in order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first start to the last end, in the units of the spans."""
        every = [span for own in self.spans for span in own]
        first = min((span.start for span in every), default=0.0)
        return max((span.end for span in every), default=0.0) - first

    @property
    def busy(self) -> list[float]:
        """For each rank the time that it works."""
        return [sum(span.end - span.start for span in own) for own in self.spans]

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' whole time, 0 to 1: (K-1)/(M+K-1) for GPipe and 1F1B."""
        available = self.seconds * len(self.spans)
        return 1 - sum(self.busy) / available if available else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over working time: (K-1)/M for GPipe and 1F1B, as some papers define it."""
        working = sum(self.busy)
        return (self.seconds * len(self.spans) - working) / working if working else 0.0


def bubble(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """(K-1)/(vM+K-1): the idle fraction of the whole time, 0 to 1.

    It is that of GPipe, of 1F1B and, where K divides M, of interleaved 1F1B with v chunks.
    """
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def bubble_of_ideal(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """(K-1)/(vM): the same idle time over the time that the work alone would take."""
    return (ranks - 1) / (chunks * micro_batches)


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    transfer: float = 0.0,
) -> Timeline:
    """Play a schedule: an action starts when its rank is free and all that it `needs` has arrived.

    forward, backward  time of one micro-batch on a rank's whole part of the model, which its chunks
                       divide evenly; or a list, one time per stage
    transfer           time from the end of an action until another rank has its result
    Of a backward pass in two parts, "I" and "W", each takes half. Any unit of time will do. Raises
    ValueError for a list of another length, and for a schedule in which ranks wait for each other
    for ever.
    """
    backward_times = _per_stage("backward", backward, schedule)
    halves = [time / 2 for time in backward_times]
    durations = {
        "F": _per_stage("forward", forward, schedule),
        "B": backward_times,
        "I": halves,
        "W": halves,
    }
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.actions]

    def earliest_start(action: Action, rank: int) -> float | None:
        """When all that an action needs has arrived; None while something is not done yet."""
        before = needs(action, schedule.stages)
        if not all(needed in ends for needed in before):
            return None
        arrivals = [
            ends[needed] + transfer * (schedule.rank_of(needed.stage) != rank) for needed in before
        ]
        return max([spans[rank][-1].end if spans[rank] else 0.0, *arrivals])

    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(schedule.actions):
            while len(spans[rank]) < len(own):
                action = own[len(spans[rank])]
                start = earliest_start(action, rank)
                if start is None:
                    break
                end = start + durations[action.kind][action.stage]
                spans[rank].append(Span(action, start, end))
                ends[action._replace(version=None)] = end
                progress = True
    stuck = [
        f"rank {rank} at {own[len(done)]}"
        for rank, (own, done) in enumerate(zip(schedule.actions, spans))
        if len(done) < len(own)
    ]
    if stuck:
        raise ValueError(
            f"In {schedule.name} ranks wait for each other for ever: {', '.join(stuck)}. Put each "
            "action after what it needs."
        )
    return Timeline(schedule, tuple(map(tuple, spans)))


def _per_stage(name: str, times: float | Sequence[float], schedule: Schedule) -> list[float]:
    if not isinstance(times, Sequence):
        return [times * schedule.ranks / schedule.stages] * schedule.stages
    if len(times) != schedule.stages:
        raise ValueError(
            f"{name} lists {len(times)} times for {schedule.stages} stages: give one per stage."
        )
    return list(times)
