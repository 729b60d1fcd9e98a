"""Which run of a sweep is next: a grid, then more seeds around its best rate, then more steps.

1. An arm's learning rates, in factors of two, with two seeds, until the best is not at an edge.
2. All seeds at its best rate and at both neighbours. If a neighbour is now better, its other
   neighbour as well, until the best lies between two others. Then the next arm.
3. Twice the steps at the best rate, all seeds, to see whether the accuracy has levelled off.

The next run follows from the runs that are kept, so a sweep that was killed goes on by itself. A
fine-tune that another sweep has made already is taken from there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from dataclasses import replace as with_
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from benchmarks.sweeps import results, trial
from benchmarks.sweeps.plans import SweepPlan
from benchmarks.sweeps.results import Sweep, SweepRun
from helpers.profile import environment

WIDEST = 12  # learning rates of a grid: a factor of 2,048 between the ends


class Wanted(NamedTuple):
    """A run that is to be made."""

    arm: str
    rate: float
    seed: int
    steps: int


def next_run(sweep: Sweep, seeds: tuple[int, ...], twice: bool) -> Wanted | None:
    """The next run of a sweep, None where it is finished.

    Raises RuntimeError for a grid that grows and grows.
    """
    stages: list[Callable[[str], Iterable[Wanted]]] = [
        lambda arm: chain(_grid(sweep, arm, seeds[: results.GRID]), _around(sweep, arm, seeds))
    ]
    if twice:
        stages.append(lambda arm: _twice(sweep, arm, seeds))
    for stage in stages:
        for arm in sweep.arms:
            for wanted in stage(arm.name):
                if wanted.seed not in sweep.at(wanted.arm, wanted.rate, wanted.steps):
                    return wanted
    return None


def _grid(sweep: Sweep, arm: str, seeds: tuple[int, ...]) -> Iterable[Wanted]:
    start, steps = sweep.arm(arm).start, sweep.steps(arm)
    low, high = start / results.FACTOR, start * results.FACTOR
    rates = [low, start, high]
    while True:
        # A generator is asked anew after each run, so only what is kept is compared.
        yield from (Wanted(arm, rate, seed, steps) for rate in rates for seed in seeds)
        best = max(rates, key=lambda rate: _validation(sweep, arm, rate, seeds))
        if low < best < high:
            return
        if len(rates) == WIDEST:
            raise RuntimeError(
                f"{sweep.name}, {arm}: the best of {WIDEST} learning rates is still at an edge "
                f"({best:g}); look at the runs before you go on."
            )
        if best == low:
            low /= results.FACTOR
            rates = [low, *rates]
        else:
            high *= results.FACTOR
            rates = [*rates, high]


def _around(sweep: Sweep, arm: str, seeds: tuple[int, ...]) -> Iterable[Wanted]:
    steps, best = sweep.steps(arm), sweep.best(arm, results.GRID)
    while True:
        for rate in (best, best / results.FACTOR, best * results.FACTOR):
            yield from (Wanted(arm, rate, seed, steps) for seed in seeds)
        if sweep.best(arm, len(seeds)) == best:
            return
        best = sweep.best(arm, len(seeds))


def _twice(sweep: Sweep, arm: str, seeds: tuple[int, ...]) -> Iterable[Wanted]:
    best, steps = sweep.best(arm, len(seeds)), 2 * sweep.steps(arm)
    yield from (Wanted(arm, best, seed, steps) for seed in seeds)


def _validation(sweep: Sweep, arm: str, rate: float, seeds: tuple[int, ...]) -> float:
    runs = sweep.at(arm, rate)
    return sum(runs[seed].validation for seed in seeds) / len(seeds)


def opened(plan: SweepPlan, command: str, folder: Path | None = None) -> Sweep:
    """The kept sweep of a plan, or a new one. A kept one may lack arms, which its plan has gained.

    Raises ValueError where what is kept was run with other settings or other versions.
    """
    new = Sweep(
        name=plan.name,
        question=plan.question,
        base=plan.base,
        arms=plan.arms,
        validation=plan.validation,
        environment=environment("cpu"),
        command=command,
        references={name: trial.REFERENCES[name](plan.base) for name in plan.references},
        note=plan.note,
    )
    if plan.name not in results.names(folder):
        return new
    kept = results.read(plan.name, folder)
    as_planned = with_(new, arms=tuple(arm for arm in new.arms if arm in kept.arms))
    for name in ("base", "arms", "validation", "environment"):
        if getattr(kept, name) != getattr(as_planned, name):
            raise ValueError(
                f"The kept sweep {plan.name} has another {name} than this one: delete "
                "its file to run it anew."
            )
    return with_(new, runs=kept.runs)


def _known(sweep: Sweep, wanted: Wanted, others: list[Sweep]) -> SweepRun | None:
    """The same fine-tune out of another sweep on the same data and versions, if it is kept there.

    On one machine equal recipes give equal weights, so that there is no use in running it again.
    """
    recipe, extra = trial.recipe_of(sweep, *wanted), sweep.arm(wanted.arm).extra
    for other in others:
        if (other.validation, other.environment) != (sweep.validation, sweep.environment):
            continue
        for arm in other.arms:
            run = other.at(arm.name, wanted.rate, wanted.steps).get(wanted.seed)
            place = arm.name, wanted.rate, wanted.seed, wanted.steps
            if run and arm.extra == extra and trial.recipe_of(other, *place) == recipe:
                return with_(run, arm=wanted.arm)
    return None


def go_on(
    sweep: Sweep,
    seeds: tuple[int, ...],
    twice: bool = True,
    end: float = float("inf"),
    folder: Path | None = None,
    run: Callable[..., SweepRun] = trial.run,
) -> bool:
    """Make the runs that a sweep still lacks, each kept at once. True where it is finished.

    end  no run begins after this `time.monotonic()`
    """
    others = [results.read(n, folder) for n in results.names(folder) if n != sweep.name]
    while wanted := next_run(sweep, seeds, twice):
        if time.monotonic() >= end:
            return False
        made = _known(sweep, wanted, others) or run(sweep, *wanted)
        sweep.runs.append(made)
        write(sweep, folder)
        print(
            f"{sweep.name}: {made.arm}, rate {made.learning_rate:.3g}, seed {made.seed}, "
            f"{made.steps} steps: validation {made.validation:.1%}, test {made.accuracy:.1%}, "
            f"loss {made.last_loss}, {made.seconds:.1f} s",
            flush=True,
        )
    return True


def write(sweep: Sweep, folder: Path | None = None) -> Path:
    """Write a sweep to its file, one line per run, whole or not at all."""
    values = {item.name: getattr(sweep, item.name) for item in fields(sweep)}
    values |= {"base": sweep.base.to_dict(), "arms": [asdict(arm) for arm in sweep.arms]}
    runs = values.pop("runs")
    head = json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False)
    lines = [json.dumps(asdict(run), allow_nan=False, ensure_ascii=False) for run in runs]
    folder = folder or results.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sweep.name}.json"
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    text = head[:-2] + ',\n "runs": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    unfinished.write_text(text, encoding="utf8")
    os.replace(unfinished, path)
    return path
