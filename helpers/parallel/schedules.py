"""Pipeline schedules as plain data, and a machine that plays them: which rank works on what, when, and who waits.

K ranks, each with its part of the model; M micro-batches a step. A schedule is a list of actions for each rank. A rank
does its own in order; an action waits for what it needs from other ranks. The only other rule is `needs`.

    played = simulate(one_f_one_b(ranks=4, micro_batches=8), forward=1, backward=2)
    played.bubble, played.spans[0], played.held
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

KINDS = ("F", "B", "I", "W")
WEIGHTS = ("latest", "stash", "vertical")


class Action(NamedTuple):
    """kind     "F" forward, "B" backward; or a backward in two parts: "I" the gradient of the inputs, which the stage
                below waits for, and "W" that of the weights, for which nobody waits
    version     optimizer steps behind the weights it uses (schedules without a flush only, else None)

    Its text is torch's: stage, kind, micro-batch, e.g. "0F3".
    """

    kind: str
    micro_batch: int
    stage: int
    version: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """actions[rank] is what that rank does, in order. Stage s of the model lies on rank s % ranks."""

    name: str
    ranks: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    stages: int

    @property
    def chunks(self) -> int:
        """Stages a rank."""
        return self.stages // self.ranks

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    @property
    def held(self) -> list[int]:
        """Most micro-batches whose activations a stage holds at once: from its F until its B (or W) is done."""
        return [max(counts) for counts in zip(*self._in_flight())]

    @property
    def held_by_rank(self) -> list[float]:
        """The same for a rank, over all its stages at one moment, in K-th parts of the model."""
        return [
            max(sum(counts[rank :: self.ranks]) for counts in self._in_flight(rank)) / self.chunks
            for rank in range(self.ranks)
        ]

    @property
    def versions(self) -> list[int]:
        """Copies of its weights that each stage keeps at most: those that an action still to come will use, and the
        newest. 1 for schedules with a flush."""
        most = [1] * self.stages
        for own in self.actions:
            done = dict.fromkeys(range(self.stages), 0)
            for place, action in enumerate(own):
                used = {later.version for later in own[place:] if later.stage == action.stage}
                used = {
                    version
                    for version in used
                    if version is not None and version <= done[action.stage]
                }
                most[action.stage] = max(most[action.stage], len(used | {done[action.stage]}))
                done[action.stage] += action.kind == "B" and action.version is not None
        return most

    def _in_flight(self, only: int | None = None) -> list[list[int]]:
        """After each action of each rank: micro-batches held, by stage."""
        found = [[0] * self.stages]
        for rank, own in enumerate(self.actions):
            counts = [0] * self.stages
            split = any(action.kind == "W" for action in own)
            for action in own if only in (None, rank) else ():
                counts[action.stage] += (action.kind == "F") - (
                    action.kind == ("W" if split else "B")
                )
                found.append(list(counts))
        return found


def naive(ranks: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time: one rank works, the others wait."""
    _check(ranks, micro_batches)
    return _schedule(
        "naive",
        ranks,
        micro_batches,
        [
            [Action(kind, m, rank) for m in range(micro_batches) for kind in "FB"]
            for rank in range(ranks)
        ],
    )


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2018). Each stage holds M micro-batches."""
    _check(ranks, micro_batches)
    return _schedule(
        "GPipe",
        ranks,
        micro_batches,
        [
            [Action(kind, m, rank) for kind in "FB" for m in range(micro_batches)]
            for rank in range(ranks)
        ],
    )


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """One forward, one backward, with a flush at the end (PipeDream-flush, Narayanan et al. 2020). Stage s holds at
    most K - s micro-batches."""
    _check(ranks, micro_batches)
    actions = []
    for rank in range(ranks):
        warm = min(micro_batches, ranks - 1 - rank)  # forward passes before the first pair
        actions.append(_pairs(rank, warm, micro_batches))
    return _schedule("1F1B", ranks, micro_batches, actions)


def _pairs(stage: int, warm: int, micro_batches: int) -> list[Action]:
    own = [Action("F", m, stage) for m in range(warm)]
    for m in range(micro_batches):
        own += [Action("F", m + warm, stage)] if m + warm < micro_batches else []
        own.append(Action("B", m, stage))
    return own


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` stages a rank (Narayanan et al. 2021): stage s on rank s % K, each 1/chunks as long.

    Micro-batches go in rounds of about K. Raises ValueError where they cannot: they must be a multiple of the number of
    rounds, max(1, M // K).
    """
    _whole("chunks", chunks, 1)
    _check(ranks, micro_batches)
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise ValueError(
            f"micro_batches={micro_batches} cannot go in {rounds} equal rounds of about {ranks} ranks: "
            f"use a multiple of {ranks}."
        )
    group, total = micro_batches // rounds, micro_batches * chunks
    actions = []
    for rank in range(ranks):

        def nth(kind: str, count: int) -> Action:
            """The rank's count-th forward or backward: `group` micro-batches on a chunk, then on the next chunk."""
            turn, within = divmod(count, group * chunks)
            chunk, m = divmod(within, group)
            chunk = chunk if kind == "F" else chunks - 1 - chunk
            return Action(kind, turn * group + m, chunk * ranks + rank)

        warm = min(total, (chunks - 1) * group + 2 * (ranks - 1 - rank))
        own = [nth("F", count) for count in range(warm)]
        for count in range(total):
            own += [nth("F", count + warm)] if count + warm < total else []
            own.append(nth("B", count))
        actions.append(own)
    return _schedule(f"interleaved, {chunks} chunks a rank", ranks, micro_batches, actions, chunks)


def zero_bubble(ranks: int, micro_batches: int) -> Schedule:
    """1F1B whose backward passes come in two parts (ZB-H1, Qi et al. 2023): the weights' part waits for a gap.

    Rank r puts off r weight gradients, so that each stage holds at most K micro-batches, as 1F1B's first stage does.
    """
    _check(ranks, micro_batches)
    actions = []
    for rank in range(ranks):
        own, done = [], 0
        for action in _pairs(rank, min(micro_batches, ranks - 1 - rank), micro_batches):
            own.append(action if action.kind == "F" else action._replace(kind="I"))
            if action.kind == "B" and action.micro_batch >= rank:
                own.append(Action("W", done, rank))
                done += 1
        actions.append(own + [Action("W", m, rank) for m in range(done, micro_batches)])
    return _schedule("zero bubble", ranks, micro_batches, actions)


def pipedream(ranks: int, micro_batches: int, weights: str = "stash") -> Schedule:
    """1F1B without a flush (Narayanan et al. 2019): every backward pass is followed by an optimizer step of its stage.

    `micro_batches` is the length of the whole stream, and `version` says which weights an action uses:
    weights  "latest": what is there, so that F and B of one micro-batch differ; "stash": B uses those of its F;
             "vertical": all stages use the version that the first stage had when the micro-batch entered
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r} is not known: use one of {', '.join(WEIGHTS)}.")
    plain = one_f_one_b(ranks, micro_batches)
    actions = []
    for rank, own in enumerate(plain.actions):
        own_delay = ranks - 1 if weights == "vertical" else ranks - 1 - rank
        delay = {"F": own_delay, "B": 0 if weights == "latest" else own_delay}
        actions.append(
            [
                action._replace(version=max(0, action.micro_batch - delay[action.kind]))
                for action in own
            ]
        )
    return replace(plain, name=f"PipeDream, {weights}", actions=tuple(map(tuple, actions)))


def needs(action: Action, stages: int) -> list[Action]:
    """What must be done before an action, on whatever rank (versions left out)."""
    kind, m, stage, _ = action
    if kind == "F":
        return [Action("F", m, stage - 1)] if stage else []
    if kind == "W":
        return [Action("I", m, stage)]
    return [Action("F", m, stage)] + ([Action(kind, m, stage + 1)] if stage < stages - 1 else [])


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
        """From the first start to the last end."""
        every = [span for own in self.spans for span in own]
        return max((span.end for span in every), default=0.0) - min(
            (span.start for span in every), default=0.0
        )

    @property
    def busy(self) -> list[float]:
        return [sum(span.end - span.start for span in own) for own in self.spans]

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' whole time, 0 to 1: (K-1)/(M+K-1) for GPipe and 1F1B."""
        whole = self.seconds * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over working time: (K-1)/M for GPipe and 1F1B. The papers' other convention."""
        return (
            (self.seconds * len(self.spans) - sum(self.busy)) / sum(self.busy)
            if sum(self.busy)
            else 0.0
        )


def bubble(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """(K-1)/(vM+K-1): share of the whole time that GPipe, 1F1B and interleaved 1F1B (K divides M) leave idle."""
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def bubble_of_ideal(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """(K-1)/(vM): the same idle time over the time that the work alone would take."""
    return (ranks - 1) / (chunks * micro_batches)


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    weight_share: float = 0.5,
    transfer: float = 0.0,
) -> Timeline:
    """Play a schedule: each action starts when its rank is free and all that it `needs` has arrived.

    forward, backward  time of a micro-batch on a rank's whole part of the model, which its chunks share evenly; or a
                       list, one a stage
    weight_share       the part of `backward` that is "W"; the rest is "I"
    transfer           time from the end of an action until another rank has its result
    Raises ValueError for a schedule in which ranks wait for each other for ever.
    """
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    lasts = {
        "F": _per_stage("forward", forward, schedule),
        "B": _per_stage("backward", backward, schedule),
    }
    lasts |= {
        kind: [share * value for value in lasts["B"]]
        for kind, share in (("I", 1 - weight_share), ("W", weight_share))
    }
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(schedule.actions):
            while len(spans[rank]) < len(own):
                action = own[len(spans[rank])]
                before = needs(action, schedule.stages)
                if not all(one in ends for one in before):
                    break
                start = max(
                    [spans[rank][-1].end if spans[rank] else 0.0]
                    + [
                        ends[one] + transfer * (schedule.rank_of(one.stage) != rank)
                        for one in before
                    ]
                )
                spans[rank].append(Span(action, start, start + lasts[action.kind][action.stage]))
                ends[action._replace(version=None)] = spans[rank][-1].end
                moved = True
    stuck = [
        f"rank {rank} at {own[len(done)]}"
        for rank, (own, done) in enumerate(zip(schedule.actions, spans))
        if len(done) < len(own)
    ]
    if stuck:
        raise ValueError(
            f"In {schedule.name} ranks wait for each other for ever: {', '.join(stuck)}."
        )
    return Timeline(schedule, tuple(map(tuple, spans)))


def _per_stage(name: str, given: float | Sequence[float], schedule: Schedule) -> list[float]:
    if not isinstance(given, Sequence):
        return [given * schedule.ranks / schedule.stages] * schedule.stages
    if len(given) != schedule.stages:
        raise ValueError(
            f"{name} lists {len(given)} times for {schedule.stages} stages: give one a stage."
        )
    return list(given)


def _schedule(
    name: str, ranks: int, micro_batches: int, actions: list[list[Action]], chunks: int = 1
) -> Schedule:
    return Schedule(name, ranks, micro_batches, tuple(map(tuple, actions)), ranks * chunks)


def _check(ranks: int, micro_batches: int) -> None:
    _whole("ranks", ranks, 1)
    _whole("micro_batches", micro_batches, 1)


def _whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number from {least} on.")
