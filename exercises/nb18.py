"""Exercises of notebook 18: choosing a strategy."""

from __future__ import annotations

import random

from exercises.check import exercise
from exercises.comparisons import same
from helpers.parallel import Parallel
from helpers.recipe import Recipe, replace
from helpers.strategy import plan_cache
from helpers.strategy.candidate import Candidate
from helpers.strategy.choose import SCENARIOS, choose
from tight_fit.checks import plain
from tight_fit.layouts.seconds import Link
from tight_fit.units import span

SPREAD = Parallel(data=16)  # over both machines
STAGED = Parallel(data=8, pipeline=2)  # a machine per stage


def seconds(parallel: Parallel, speed: float) -> float:
    """Seconds per step of the job of two machines whose link has this speed in bytes per second."""
    job, machines = SCENARIOS["fast links"]
    machines = replace(machines, between=Link("between", speed, machines.between.latency))
    recipe = replace(job, accumulation=8) if parallel.pipeline > 1 else job
    return Candidate(job, machines, plan_cache.planned(recipe, parallel)).time.total


def break_even() -> float:
    """The speed in bytes per second at which both take equally long, found by bisection."""
    low, high = 1e8, 1e12
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high) if seconds(SPREAD, middle) > seconds(STAGED, middle) else (low, middle)
        )
    return (low * high) ** 0.5


@exercise(
    "18.1",
    hints=[
        (
            "Ranks are counted through: tensor ranks first, then data, then pipeline. "
            "Of one line of ranks along an axis, how far apart are the first and the last?"
        ),
        (
            "A line of tensor ranks covers `tensor` ranks in a row, "
            "a line of data ranks `data * tensor`, a line of stages all of them. "
            "A line of one rank sends nothing."
        ),
    ],
    why=(
        "Where an axis lies decides which link it pays, and the order of the axes decides "
        "where it lies."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of parallel and per_machine"
    generator = random.Random(0)
    for _ in range(200):
        parallel = Parallel(
            data=generator.choice((1, 2, 4, 8)),
            pipeline=generator.choice((1, 2, 4)),
            tensor=generator.choice((1, 2, 4)),
        )
        per_machine = parallel.tensor * generator.choice((1, 2, 4, 8))
        given = answer(parallel, per_machine)
        assert isinstance(given, (set, frozenset)), (
            "your function should give a set of names of axes"
        )
        truth = leaving(parallel, per_machine)
        assert set(given) == truth, (
            f"for {parallel} and {per_machine} GPUs per machine, "
            f"your function gives {sorted(given) or 'nothing'}, "
            f"which is {'too much' if set(given) > truth else 'not right'}"
        )


def leaving(parallel: Parallel, per_machine: int) -> set[str]:
    """The axes some of whose messages leave a machine."""
    spans, axes = 1, set()
    for axis in ("tensor", "data", "pipeline"):
        spans *= getattr(parallel, axis)
        if getattr(parallel, axis) > 1 and spans > per_machine:
            axes.add(axis)
    return axes


@exercise(
    "18.2",
    hints=[
        (
            "Nothing about the layout of two GPUs is wrong. What does a T4 do in fp32, "
            "and what can it do?"
        ),
        (
            "step_time.PEAKS['T4'] has four numbers. The recipe has a field for it, "
            "and one GPU must hold the step."
        ),
    ],
    why=(
        "A second GPU at most halves the time. The GPU's own half precision does more, "
        "and no layout can know that it was not asked for."
    ),
)
def _(answer):
    assert isinstance(answer, Recipe), "your answer should be a Recipe: replace(job, ...)"
    job, machines = SCENARIOS["two T4 GPUs"]
    for field in ("model", "profile", "length", "batch_size", "optimizer", "lora_rank", "frozen"):
        mine, asked = getattr(answer, field), getattr(job, field)
        assert mine == asked, f"{field} should stay {asked!r}, yours is {mine!r}"
    assert answer.precision != "bf16", "a T4 has no bf16 arithmetic"
    assert answer.precision != "tf32", "a T4 has no TF32 arithmetic"
    single = Candidate(job, replace(machines, per_machine=1), plan_cache.planned(answer))
    assert single.fit, f"it {single.fit}"
    fastest = choose(job, machines).best.time.total
    assert single.time.total < fastest, (
        f"one T4 takes {span(single.time.total)} for it, "
        f"and two take {span(fastest)} for the job as it was"
    )


@exercise(
    "18.3",
    hints=[
        (
            "Write a GPU's peak under DDP as states + rows * per_row. "
            "What becomes of each part under stage 3?"
        ),
        (
            "The saving is states * (1 - 1 / ranks). Divide it by DDP's peak, "
            "set it equal to share, and solve for rows."
        ),
    ],
    why=(
        "ZeRO's saving is a constant. It matters as long as the activations are not far larger: "
        "that is the whole difference between a language model of billions and this one."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of states, per_row, ranks and share"
    generator = random.Random(1)
    for _ in range(50):
        states, per_row, ranks, share = (
            generator.randint(10, 10**6),
            generator.randint(1, 10**4),
            generator.choice((2, 4, 8, 64)),
            generator.choice((0.1, 0.25, 0.5, 0.9)),
        )
        given = answer(states, per_row, ranks, share)
        truth = max(0.0, (states * (1 - 1 / ranks) / share - states) / per_row)
        same(
            given,
            truth,
            rel=1e-6,
            atol=1e-6,
            what=(
                f"the examples for states={states}, per_row={per_row}, ranks={ranks}, share={share}"
            ),
        )


@exercise(
    "18.4",
    hints=[
        (
            "Both steps are in the kept plans: "
            'choose(job, replace(machines, between=Link("mine", speed, 5e-6))) at some speeds, '
            "and compare the two candidates."
        ),
        "Between 10 and 1,000 Gbit/s; halve the interval until the two take as long.",
    ],
    why=(
        "Below it, put stages on the machines; above it, spread the examples. "
        "One number of your own network replaces the rule."
    ),
)
def _(answer):
    answer = plain(answer)
    assert isinstance(answer, (int, float)) and not isinstance(answer, bool), (
        "your answer should be a number: bytes per second"
    )
    assert answer > 1e6, "bytes per second, please: 10 Gbit/s are 1.1e9 of them in practice"
    truth = break_even()
    assert abs(answer / truth - 1) < 0.1, (
        f"at {answer:.3g} bytes per second, spread examples take "
        f"{span(seconds(SPREAD, answer))} and stages {span(seconds(STAGED, answer))}"
    )
