"""Exercises of notebook 15: pipeline parallel."""

from __future__ import annotations

import random

from by_hand.timeline import naive, pipedream, simulate
from exercises.check import exercise
from exercises.comparisons import agree, close
from tight_fit.checks import plain
from tight_fit.layouts.schedules import Action, Schedule, one_f_one_b


@exercise(
    "15.1",
    hints=[
        "The bubble of the whole time is (K-1)/(M+K-1): which M makes it a tenth?",
        "7 / (M + 7) must be at most 1/10.",
    ],
    why="Of the ideal time it is then a ninth: the two conventions part where bubbles are large.",
)
def _(answer):
    assert not isinstance(answer, float) or answer == int(answer), (
        "your answer should be a whole number of micro-batches"
    )
    close(answer, 63, rel=1e-9, unit="micro-batches")


@exercise(
    "15.2",
    hints=[
        (
            "1F1B holds K - s because it begins with K - 1 - s forward passes before the first "
            "pair. What if it began with fewer?"
        ),
        "One forward pass before the first pair, on every stage but the last.",
    ],
    why="Memory for time: each stage holds two, and the pipe is never quite full.",
)
def _(answer):
    assert callable(answer), (
        "your answer should be a function of a stage, the stages and the micro-batches"
    )
    for ranks, micro in ((1, 3), (2, 1), (2, 5), (3, 3), (4, 8), (5, 4), (8, 12)):
        case = f"with {ranks} stages and {micro} micro-batches"
        actions = []
        for stage in range(ranks):
            given = answer(stage, ranks, micro)
            assert isinstance(given, list), (
                f"{case} your function should give a list for stage {stage}"
            )
            wanted = sorted((kind, m) for kind in "BF" for m in range(micro))
            assert sorted(map(tuple, given)) == wanted, (
                f"{case} stage {stage} does not do each F and B once"
            )
            actions.append(tuple(Action(kind, m, stage) for kind, m in given))
        schedule = Schedule("your schedule", ranks, micro, tuple(actions), ranks)
        most = max(schedule.held)
        assert most <= 2, f"{case} a stage holds {most} micro-batches at once"
        simulated = simulate(schedule)
        if ranks >= 3 <= micro:
            slow = simulate(naive(ranks, micro)).seconds
            assert simulated.seconds < slow, (
                f"{case} your schedule takes {simulated.seconds:g} units, the naive one {slow:g}"
            )


@exercise(
    "15.4",
    hints=[
        (
            "How many mini-batches are between their forward and their backward pass at stage s? "
            "Each has its own version."
        ),
        "Stage s keeps K - s versions.",
    ],
    why="Vertical sync keeps K versions on every stage: K times the whole model.",
)
def _(answer):
    agree(
        answer,
        _copies,
        [(1, [7]), (2, [10, 10]), (4, [100, 50, 50, 60]), (3, [0, 0, 5])],
        _some_stages,
        rel=1e-9,
    )


def _copies(ranks: int, sizes: list[int]) -> int:
    """Counted on the schedule itself."""
    return sum(
        count * size
        for count, size in zip(pipedream(ranks, 2 * ranks).versions, sizes, strict=True)
    )


def _some_stages(rng: random.Random) -> tuple[int, list[int]]:
    ranks = rng.randint(1, 8)
    return ranks, [rng.randint(0, 10**6) for _ in range(ranks)]


@exercise(
    "15.3",
    hints=[
        "Look at the two heads only: when can they be done?",
        "One send and one receive are done together; two alike, or one alone, never.",
    ],
    why=(
        "torch sends and receives such pairs in one batch; "
        "the course's transport has a lane for each direction."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of two lists"
    rng = random.Random(15)
    cases = [
        ([], []),
        (["send"], ["receive"]),
        (["send"], ["send"]),
        (["send"], []),
        ([], ["receive"]),
        _pipe(4),
    ]
    for _ in range(40):
        first = [rng.choice(("send", "receive")) for _ in range(rng.randint(1, 6))]
        second = [{"send": "receive", "receive": "send"}[action] for action in first]
        if rng.random() < 0.5:
            index = rng.randrange(len(second))
            second[index] = first[index]
        cases += [(first, second), (first, second + ["receive"])]
    for first, second in cases:
        given = plain(answer(list(first), list(second)))
        assert isinstance(given, bool), "your function should give True or False"
        truth = _stuck(first, second)
        assert given == truth, f"with {first[:6]} and {second[:6]} your function says {given}"


def _stuck(first: list[str], second: list[str]) -> bool:
    return len(first) != len(second) or any(ours == theirs for ours, theirs in zip(first, second))


def _pipe(micro: int) -> tuple[list[str], list[str]]:
    """The messages of 1F1B's two stages, in their order."""
    below, above = one_f_one_b(2, micro).actions
    return (
        [{"F": "send", "B": "receive"}[action.kind] for action in below],
        [{"F": "receive", "B": "send"}[action.kind] for action in above],
    )
