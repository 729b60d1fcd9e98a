"""The runs of a sweep, and what follows from them: best learning rates and paired differences.

A sweep compares arms: recipes that differ in a technique. Each arm has a learning rate of its own,
the one with the highest mean accuracy on validation examples, which neither train nor test. What
is reported is the accuracy on the test examples at that rate.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from helpers import record
from helpers.recipe import Recipe, replace

FOLDER = record.RESULTS / "sweeps"
VERSION = 1
FACTOR = 2.0  # between neighbouring learning rates of a grid
MANY = 5  # seeds that an arm needs at its best learning rate and at both neighbours
GRID = 2  # seeds of the other learning rates
# The 0.975 quantile of Student's t distribution for 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Arm:
    """One of the things that a sweep compares.

    name    as tables show it
    fields  what the arm changes in the recipe of the sweep
    start   the learning rate in the middle of its first grid
    extra   what no field of a recipe names, such as the matrices that get LoRA adapters
    against the arm that it is compared with; None for the first one
    """

    name: str
    fields: dict[str, Any]
    start: float
    extra: dict[str, Any] = field(default_factory=dict)
    against: str | None = None


@dataclass(frozen=True)
class SweepRun:
    """One fine-tune of a sweep.

    arm            name of its arm
    learning_rate  peak learning rate
    seed           of the new head, the order of the examples and dropout
    steps          optimizer steps: the arm's own, or twice as many
    accuracy       on the test examples, 0 to 1; 0 for a run that diverged
    validation     accuracy on the validation examples, likewise
    last_loss      mean training loss of the last tenth of the steps; None for a run that diverged
    seconds        wall-clock seconds of the training
    cpu_seconds    processor seconds of the training
    date           UTC, ISO 8601
    """

    arm: str
    learning_rate: float
    seed: int
    steps: int
    accuracy: float
    validation: float
    last_loss: float | None
    seconds: float
    cpu_seconds: float
    date: str


@dataclass(frozen=True)
class Paired:
    """Differences of two arms, seed by seed.

    mean  of the differences
    low, high  its 95 % interval by Student's t
    seeds  how many pairs there are
    """

    mean: float
    low: float
    high: float
    seeds: int


def paired(differences: Iterable[float]) -> Paired:
    """The mean of paired differences and its 95 % interval. Raises ValueError for fewer than 2."""
    values = list(differences)
    if not 2 <= len(values) <= len(STUDENT) + 1:
        raise ValueError(
            f"{len(values)} paired differences give no interval: "
            f"give 2 to {len(STUDENT) + 1}, one per seed."
        )
    mean = statistics.mean(values)
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return Paired(mean, mean - half, mean + half, len(values))


@dataclass(frozen=True)
class Sweep:
    """A comparison of arms, each at its own best learning rate, with all of its runs.

    name         such as "03_freezing"
    question     what it asks, in a sentence
    base         the recipe that all arms share
    arms         the first one is what the others are compared with
    validation   examples of the training split that are held out to choose learning rates
    environment  device, versions, threads (`profile.environment`)
    command      which command ran it
    references   {name: test accuracy} of methods without a learning rate
    note         what a reader must know beside the recipe, in whole sentences
    runs         every fine-tune
    """

    name: str
    question: str
    base: Recipe
    arms: tuple[Arm, ...]
    validation: int
    environment: dict[str, Any]
    command: str
    references: dict[str, float] = field(default_factory=dict)
    note: str = ""
    runs: list[SweepRun] = field(default_factory=list)
    version: int = VERSION

    def arm(self, name: str) -> Arm:
        """The arm of this name. Raises ValueError for a name that no arm has."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise ValueError(
            f"Sweep {self.name} has no arm {name!r}: it has {', '.join(a.name for a in self.arms)}."
        )

    def recipe(self, arm: str, rate: float, seed: int, steps: int | None = None) -> Recipe:
        """The recipe of one run. steps: None takes the arm's own."""
        recipe = replace(self.base, **self.arm(arm).fields, learning_rate=rate, seed=seed)
        return recipe if steps is None else replace(recipe, steps=steps)

    def steps(self, arm: str) -> int:
        """Optimizer steps of an arm."""
        return self.arm(arm).fields.get("steps", self.base.steps)

    def at(self, arm: str, rate: float, steps: int | None = None) -> dict[int, SweepRun]:
        """{seed: run} of an arm at a learning rate. steps: None takes the arm's own."""
        wanted = arm, rate, steps or self.steps(arm)
        found = [run for run in self.runs if (run.arm, run.learning_rate, run.steps) == wanted]
        return {run.seed: run for run in sorted(found, key=lambda run: run.seed)}

    def rates(self, arm: str, seeds: int = GRID) -> list[float]:
        """Learning rates of an arm, rising, that have at least so many seeds at its own steps."""
        steps = self.steps(arm)
        tried = {run.learning_rate for run in self.runs if (run.arm, run.steps) == (arm, steps)}
        return sorted(rate for rate in tried if len(self.at(arm, rate)) >= seeds)

    def best(self, arm: str, seeds: int = MANY) -> float:
        """The learning rate with the highest mean validation accuracy; of equals the lowest.

        seeds  only rates with at least so many seeds count; of those with more, all seeds do
        Raises ValueError where there is no such rate.
        """
        rates = self.rates(arm, seeds)
        if not rates:
            raise ValueError(
                f"Sweep {self.name} has no learning rate of {arm!r} with {seeds} seeds: "
                f"finish it with `make sweeps N={self.name[:2]}`."
            )
        limit = None if seeds == MANY else seeds
        return max(rates, key=lambda rate: _mean(self.at(arm, rate), "validation", limit))

    def finished(self, arm: str) -> bool:
        """Whether the best learning rate and both of its neighbours have enough seeds."""
        full = self.rates(arm, MANY)
        if not full:
            return False
        best = self.best(arm)
        return {best / FACTOR, best * FACTOR} <= set(full)

    def scores(self, arm: str, steps: int | None = None) -> dict[int, float]:
        """{seed: test accuracy} of an arm at its best learning rate, of all steps that it took.

        steps  None takes the arm's own; others must have been run
        """
        runs = self.at(arm, self.best(arm), steps)
        return {seed: run.accuracy for seed, run in runs.items()}

    def other(self, arm: str) -> str:
        """The arm that an arm is compared with."""
        return self.arm(arm).against or self.arms[0].name

    def difference(self, arm: str, other: str | None = None) -> Paired:
        """Test accuracy of an arm minus that of another (None: `other(arm)`), seed by seed."""
        ours, theirs = self.scores(arm), self.scores(other or self.other(arm))
        return paired(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))

    def gain_of_twice_the_steps(self, arm: str) -> Paired | None:
        """Test accuracy after twice the steps minus that after the arm's own, seed by seed.

        Both at the best learning rate of the arm's own steps. It says how flat the plateau is. None
        where twice the steps were not run.
        """
        once, twice = self.scores(arm), self.scores(arm, 2 * self.steps(arm))
        if len(twice) < 2:
            return None
        return paired(twice[seed] - once[seed] for seed in sorted(once.keys() & twice.keys()))

    def to_json(self) -> str:
        """The text that is kept: one line per run."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values |= {"base": self.base.to_dict(), "arms": [asdict(arm) for arm in self.arms]}
        runs = values.pop("runs")
        head = json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False)
        lines = [json.dumps(asdict(run), allow_nan=False, ensure_ascii=False) for run in runs]
        return head[:-2] + ',\n "runs": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Sweep:
        """Raises ValueError, in one sentence, for text that is no sweep of this version."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"This is not a sweep: its JSON is malformed ({error}).") from error
        expected = {item.name for item in fields(cls)}
        if not isinstance(values, dict) or set(values) | {"note"} != expected:
            raise ValueError(f"This is not a sweep: it must hold {', '.join(sorted(expected))}.")
        if values["version"] != VERSION:
            raise ValueError(
                f"This sweep has version {values['version']}; this code reads version {VERSION}."
            )
        values["base"] = Recipe.from_dict(values["base"])
        values["arms"] = tuple(Arm(**arm) for arm in values["arms"])
        values["runs"] = [SweepRun(**run) for run in values["runs"]]
        return cls(**values)


def _mean(runs: dict[int, SweepRun], name: str, limit: int | None = None) -> float:
    """Mean of a field over the first `limit` seeds (None: all)."""
    return statistics.mean(getattr(run, name) for run in list(runs.values())[:limit])


def names(folder: Path | None = None) -> list[str]:
    """The sweeps that are kept."""
    return sorted(path.stem for path in (folder or FOLDER).glob("*.json"))


def read(name: str, folder: Path | None = None) -> Sweep:
    """A kept sweep, such as read("03_freezing").

    Raises FileNotFoundError for a name that is not kept, ValueError for a damaged file.
    """
    path = (folder or FOLDER) / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(
            f"No sweep {name!r} is kept: there are {', '.join(names(folder)) or 'none'}; "
            "`make sweeps` runs the others."
        )
    return Sweep.from_json(path.read_text(encoding="utf8"))


def write(sweep: Sweep, folder: Path | None = None) -> Path:
    """Write a sweep to its file, whole or not at all."""
    folder = folder or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sweep.name}.json"
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    unfinished.write_text(sweep.to_json(), encoding="utf8")
    os.replace(unfinished, path)
    return path
