"""Pipeline schedules as plain data.

A schedule says which rank works on what, and when. There are K ranks, each with its part of the
model, and M micro-batches per step. A schedule is a list of actions for each rank. A rank does its
own actions in order, and each action waits for what it needs from other ranks (`needs`).
`layouts.clocks` plays a schedule with the times of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tight_fit.checks import one_of, whole


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


# By the names that layouts use.
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def schedule_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The order of the actions of a pipeline's ranks; they are those of torch's own schedules.

    Raises ValueError for an unknown name and for micro-batches that the schedule cannot take.
    """
    one_of("schedule", name, SCHEDULES)
    return SCHEDULES[name](ranks, micro_batches)


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


def _schedule(
    name: str, ranks: int, micro_batches: int, actions: list[list[Action]], chunks: int = 1
) -> Schedule:
    return Schedule(name, ranks, micro_batches, tuple(map(tuple, actions)), ranks * chunks)


def _check(ranks: int, micro_batches: int) -> None:
    whole("ranks", ranks, 1)
    whole("micro_batches", micro_batches, 1)
