"""Kept sweeps: best learning rates, paired differences, and what lessons show of them.

A sweep compares arms: recipes that differ in a technique. Each arm has a learning rate of its own,
the one with the highest mean accuracy on validation examples, which neither train nor test. What
is reported is the accuracy on the test examples at that rate. Every run is kept in results/sweeps/;
the tables and curves that follow from the runs are kept in helpers/kept/sweeps.json, where
`helpers.sweeps` reads them.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from helpers import profile, record
from helpers.recipe import Recipe
from helpers.sweeps import KEPT
from helpers.tables import Paired, paired
from tight_fit.files import replace_all

FOLDER = record.RESULTS / "sweeps"
VERSION = 1
FACTOR = 2.0  # between neighbouring learning rates of a grid
MANY = 5  # seeds that an arm needs at its best learning rate and at both neighbours
GRID = 2  # seeds of the other learning rates


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


def keep() -> Path:
    """Keep what lessons show of each sweep that is finished; returns the path of the file."""
    sweeps = map(read, names())
    found = {sweep.name: shown(sweep) for sweep in sweeps if not unfinished(sweep)}
    replace_all(KEPT.parent, {KEPT.name: json.dumps(found, indent=1, ensure_ascii=False) + "\n"})
    return KEPT


def shown(sweep: Sweep) -> dict[str, Any]:
    """What `helpers.sweeps` shows: rows and caption of both tables, the curves, and their text.

    Raises ValueError for a sweep that is not finished.
    """
    if lacking := unfinished(sweep):
        raise ValueError(
            f"Sweep {sweep.name} is not finished: {', '.join(lacking)} lack {MANY} seeds at the "
            f"best learning rate and its neighbours; `make sweeps N={sweep.name[:2]}` goes on."
        )
    return {
        "table": {"rows": _rows(sweep), "caption": _caption(sweep)},
        "short": {"rows": _short(sweep), "caption": _short_caption(sweep)},
        "curves": [_curve(sweep, arm.name) for arm in sweep.arms],
        "alt": _alt(sweep),
    }


def unfinished(sweep: Sweep) -> list[str]:
    """The arms that still lack seeds."""
    return [arm.name for arm in sweep.arms if not sweep.finished(arm.name)]


def _rows(sweep: Sweep) -> list[dict[str, str]]:
    """A row per arm, with means, deviations and intervals."""
    rows = [
        {"arm": label, "accuracy": f"{accuracy:.1%}", "best learning rate": "none"}
        for label, accuracy in sweep.references.items()
    ]
    for number, arm in enumerate(sweep.arms):
        scores = list(sweep.scores(arm.name).values())
        row = {
            "arm": arm.name,
            "best learning rate": f"{sweep.best(arm.name):.2g}",
            "accuracy": f"{statistics.mean(scores):.1%} ± {100 * statistics.stdev(scores):.1f}",
            "difference": sweep.difference(arm.name).points if number else "first arm",
            "seeds": str(len(scores)),
        }
        if any(other.against for other in sweep.arms):
            row["from"] = sweep.other(arm.name) if number else "n/a"
        row |= _steps(sweep, arm)
        twice = sweep.gain_of_twice_the_steps(arm.name)
        if twice:
            row["twice the steps"] = twice.points
        rows.append(row)
    return rows


def _steps(sweep: Sweep, arm: Arm) -> dict[str, str]:
    """The cell of an arm's steps, where the arms differ in them."""
    differ = len({sweep.steps(other.name) for other in sweep.arms}) > 1
    return {"steps": str(sweep.steps(arm.name))} if differ else {}


def _short(sweep: Sweep) -> list[dict[str, str]]:
    """A row per arm: who wins, by how much and how sure."""
    rows = [
        {"trained": label, "best learning rate": "none", "accuracy": f"{accuracy:.1%}"}
        for label, accuracy in sweep.references.items()
    ]
    for number, arm in enumerate(sweep.arms):
        scores = sweep.scores(arm.name).values()
        row = {
            "trained": arm.name,
            "best learning rate": f"{sweep.best(arm.name):.2g}",
            "accuracy": f"{statistics.mean(scores):.1%}",
            "difference": _sure(sweep, arm.name) if number else "",
        }
        rows.append(row | _steps(sweep, arm))
    return rows


def _short_caption(sweep: Sweep) -> str:
    seeds = len(sweep.scores(sweep.arms[-1].name))
    what = f"Run once and kept: {profile.describe(sweep.base)}, {seeds} seeds per row"
    return f"{what}, each row at its own best learning rate; differences in points."


def _sure(sweep: Sweep, arm: str) -> str:
    """A difference in points, and whether its interval leaves zero out."""
    found = sweep.difference(arm)
    sure = "sure" if found.low > 0 or found.high < 0 else "not sure"
    other = sweep.other(arm)
    against = "" if other == sweep.arms[0].name else f" (from {other})"
    return f"{100 * found.mean:+.1f}, {sure}{against}"


def _caption(sweep: Sweep) -> str:
    """What a sweep is: model, data, steps, seeds, device and date, in a few sentences."""
    recipe, machine = sweep.base, sweep.environment
    changed = {name for arm in sweep.arms for name in arm.fields}
    settings = {
        "batch_size": f"batches of {recipe.batch_size}",
        "steps": f"{recipe.steps} steps",
        "optimizer": recipe.optimizer,
    }
    shared = [text for field, text in settings.items() if field not in changed]
    same, count = "train_size" not in changed, recipe.train_size
    examples = f"{count} training, " if same and count is not None else ""
    others = ", all others for training" if same and count is None else ""
    where = "CPU" if machine["device"] == "cpu" else machine["name"]
    return (
        f"Sweep {sweep.name}, run once and kept: {profile.describe(recipe)}; "
        f"{', '.join([*shared, ''])}"
        f"{examples}{sweep.validation} validation and {recipe.test_size} test examples"
        f"{others}; {where}, torch {machine['torch']}, {sweep.runs[-1].date[:10]}. Each arm has "
        "the learning rate with the best mean accuracy on the validation examples. Accuracy is the "
        "mean on the test examples, ± the standard deviation over the seeds. Differences in points "
        "of accuracy on the test examples, seed by seed, with 95 % intervals (Student's t)."
        f"{' ' * bool(sweep.note)}{sweep.note}"
    )


def _curve(sweep: Sweep, arm: str) -> dict[str, Any]:
    """An arm's learning rates, its test accuracies in % at each, by seed, and its best rate."""
    rates = sweep.rates(arm)
    scores = [[100 * run.accuracy for run in sweep.at(arm, rate).values()] for rate in rates]
    return {"arm": arm, "rates": rates, "scores": scores, "best": sweep.best(arm)}


def _alt(sweep: Sweep) -> str:
    """The figure in words."""
    parts = []
    for arm in sweep.arms:
        scores = sweep.scores(arm.name).values()
        best = sweep.best(arm.name)
        parts.append(f"{arm.name} {statistics.mean(scores):.1%} at a learning rate of {best:.2g}")
    return (
        "Test accuracy against peak learning rate, one line per arm, which rises to a best rate "
        f"and falls after it. At their best rates: {'; '.join(parts)}."
    )
