"""Pipeline schedules as plain data, and a simulation that plays them.

A schedule says which rank works on what, and when. There are K ranks, each with its part of the
model, and M micro-batches per step. A schedule is a list of actions for each rank. A rank does its
own actions in order, and each action waits for what it needs from other ranks (`needs`).

    played = simulate(one_f_one_b(ranks=4, micro_batches=8), forward=1, backward=2)
    played.bubble, played.spans[0], played.schedule.held
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tight_fit.checks import one_of, whole

WEIGHTS = ("latest", "stash", "vertical")


class Action(NamedTuple):
    """A pass of one micro-batch through one stage.

    kind     "F" forward, "B" backward; or a backward pass in two parts: "I" the gradient of the
             inputs, which the stage below waits for, and "W" that of the weights, for which no
             other stage waits
    version  number of optimizer steps that the weights it uses have behind them; None in schedules
             that end with a flush, where all actions of a step use the same weights

    Its text is that of torch's schedules: stage, kind, micro-batch, for example "0F3".
    """

    kind: str
    micro_batch: int
    stage: int
    version: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """actions[rank] is what that rank does, in order. Stage s of the model is on rank s % ranks."""

    name: str
    ranks: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    stages: int

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.stages // self.ranks

    def rank_of(self, stage: int) -> int:
        """The rank that a stage is on."""
        return stage % self.ranks

    @property
    def held(self) -> list[int]:
        """For each stage the most micro-batches whose activations it holds at once.

        A stage holds them from the micro-batch's "F" until its "B", or its "W", is done.
        """
        return [max(counts) for counts in zip(*self._in_flight())]

    @property
    def held_by_rank(self) -> list[float]:
        """For each rank the most that all its stages hold at one moment.

        The unit is the activations of one micro-batch in a K-th part of the model.
        """
        return [
            max(sum(counts[rank :: self.ranks]) for counts in self._in_flight(rank)) / self.chunks
            for rank in range(self.ranks)
        ]

    @property
    def versions(self) -> list[int]:
        """For each stage the most versions of its weights that it keeps at once.

        It keeps the newest version and those that an action still to come will use. In schedules
        with a flush that is 1.
        """
        most = [1] * self.stages
        for own in self.actions:
            newest = dict.fromkeys(range(self.stages), 0)
            for position, action in enumerate(own):
                stage = action.stage
                needed = {later.version for later in own[position:] if later.stage == stage}
                kept = {v for v in needed if v is not None and v <= newest[stage]}
                most[stage] = max(most[stage], len(kept | {newest[stage]}))
                newest[stage] += action.kind == "B" and action.version is not None
        return most

    def _in_flight(self, only: int | None = None) -> list[list[int]]:
        """Micro-batches held by each stage, after each action of each rank (or of rank `only`)."""
        snapshots = [[0] * self.stages]
        for rank, own in enumerate(self.actions):
            if only not in (None, rank):
                continue
            counts = [0] * self.stages
            last = "W" if any(action.kind == "W" for action in own) else "B"
            for action in own:
                counts[action.stage] += (action.kind == "F") - (action.kind == last)
                snapshots.append(list(counts))
        return snapshots


def naive(ranks: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time: one rank works, the others wait."""
    _check(ranks, micro_batches)
    actions = [
        [Action(kind, m, rank) for m in range(micro_batches) for kind in "FB"]
        for rank in range(ranks)
    ]
    return _schedule("naive", ranks, micro_batches, actions)


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2018). Each stage holds all M."""
    _check(ranks, micro_batches)
    actions = [
        [Action(kind, m, rank) for kind in "FB" for m in range(micro_batches)]
        for rank in range(ranks)
    ]
    return _schedule("GPipe", ranks, micro_batches, actions)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """One forward, one backward, and a flush (PipeDream-flush, Narayanan et al. 2020).

    Stage s holds at most K - s micro-batches.
    """
    _check(ranks, micro_batches)
    actions = [
        _alternating(rank, min(micro_batches, ranks - 1 - rank), micro_batches)
        for rank in range(ranks)
    ]
    return _schedule("1F1B", ranks, micro_batches, actions)


def _alternating(stage: int, warm_up: int, micro_batches: int) -> list[Action]:
    """`warm_up` forward passes, then forward and backward passes in turn."""
    own = [Action("F", m, stage) for m in range(warm_up)]
    for m in range(micro_batches):
        own += [Action("F", m + warm_up, stage)] if m + warm_up < micro_batches else []
        own.append(Action("B", m, stage))
    return own


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` stages per rank (Narayanan et al. 2021), each 1/chunks as long.

    Stage s is on rank s % K. Micro-batches go in rounds of about K. Raises ValueError where they
    cannot: their number must be a multiple of the number of rounds, max(1, M // K).
    """
    whole("chunks", chunks, 1)
    _check(ranks, micro_batches)
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise ValueError(
            f"micro_batches={micro_batches} cannot go in {rounds} equal rounds of about {ranks} "
            f"micro-batches: use a multiple of {ranks}."
        )
    round_length, total = micro_batches // rounds, micro_batches * chunks

    def nth(kind: str, count: int, rank: int) -> Action:
        """The rank's count-th pass of a kind: a round on one chunk, then on the next chunk."""
        number, within = divmod(count, round_length * chunks)
        chunk, m = divmod(within, round_length)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Action(kind, number * round_length + m, chunk * ranks + rank)

    actions = []
    for rank in range(ranks):
        warm_up = min(total, (chunks - 1) * round_length + 2 * (ranks - 1 - rank))
        own = [nth("F", count, rank) for count in range(warm_up)]
        for count in range(total):
            own += [nth("F", count + warm_up, rank)] if count + warm_up < total else []
            own.append(nth("B", count, rank))
        actions.append(own)
    return _schedule(f"interleaved, {chunks} chunks a rank", ranks, micro_batches, actions, chunks)


def zero_bubble(ranks: int, micro_batches: int) -> Schedule:
    """1F1B whose backward passes come in two parts (ZB-H1, Qi et al. 2023).

    The weights' part waits for a gap: rank r puts off r weight gradients, so that each stage holds
    at most K micro-batches, as 1F1B's first stage does.
    """
    _check(ranks, micro_batches)
    actions = []
    for rank in range(ranks):
        own, done = [], 0
        for action in _alternating(rank, min(micro_batches, ranks - 1 - rank), micro_batches):
            own.append(action if action.kind == "F" else action._replace(kind="I"))
            if action.kind == "B" and action.micro_batch >= rank:
                own.append(Action("W", done, rank))
                done += 1
        actions.append(own + [Action("W", m, rank) for m in range(done, micro_batches)])
    return _schedule("zero bubble", ranks, micro_batches, actions)


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


def needs(action: Action, stages: int) -> list[Action]:
    """What must be done before an action, on whatever rank (versions left out)."""
    kind, m, stage, _ = action
    if kind == "F":
        return [Action("F", m, stage - 1)] if stage else []
    if kind == "W":
        return [Action("I", m, stage)]
    return [Action("F", m, stage)] + ([Action(kind, m, stage + 1)] if stage < stages - 1 else [])


def consumer(action: Action, stages: int) -> Action | None:
    """The action of the neighbouring stage that waits for an action's result, if there is one."""
    if action.kind == "W":
        return None
    stage = action.stage + (1 if action.kind == "F" else -1)
    return Action(action.kind, action.micro_batch, stage) if 0 <= stage < stages else None


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


def _schedule(
    name: str, ranks: int, micro_batches: int, actions: list[list[Action]], chunks: int = 1
) -> Schedule:
    return Schedule(name, ranks, micro_batches, tuple(map(tuple, actions)), ranks * chunks)


def _check(ranks: int, micro_batches: int) -> None:
    whole("ranks", ranks, 1)
    whole("micro_batches", micro_batches, 1)
