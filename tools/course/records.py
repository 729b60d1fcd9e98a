"""Records that are kept in results/: what their fields may hold, and what is refused.

A notebook writes what it measured. `make record` and `tools.course keep` let in here what makes a
whole run, so that whoever reads results/ need not ask again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from helpers import record
from helpers.recipe import Recipe
from helpers.record import NAME, UNNAMED, VERSION, Run
from tight_fit import gpus
from tight_fit.checks import clipped, of_type, one_of, real, shown, whole
from tight_fit.files import small_text

SESSION = "session.json"  # beside runs: what `make record` has done so far; it is no run
LARGEST = 1 << 26  # bytes of a record
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")  # so that dates compare as text does
FIRST_YEAR = 2020  # before it there was no such course
SLACK = timedelta(days=1)  # by which clocks may differ
KNOWN = {"tracked", "allocated", "reserved", "device", "at_peak", "target", "peak", "flops"}
LONGEST = 366 * 86400.0  # seconds of a run
SLACK_OF_GPUS = 1.1  # GPUs of one name differ a little in what they have
BYTES, FLOPS = 2**63 - 1, 10**30  # more than any machine has, or any step takes


def read_file(path: Path) -> Run:
    """The run in a file `<notebook>.<label>[.<device>].json`.

    Raises ValueError, which names the file, for one that is no complete run, or another file's.
    """
    try:
        run = of_text(small_text(path, LARGEST))
        if not path.name.startswith(f"{run.name.replace('/', '.')}."):
            raise ValueError(f"The file does not have the name of its run, {run.name!r}.")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is no record: it is not written in UTF-8.") from None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is no record: {error}") from error
    return run


def read_all(folder: Path | None = None) -> list[Run]:
    """The runs in a folder, by file name; a bad file, and one of a rehearsal, costs one line.

    The state of `make record` (SESSION) is no bad file, and passed over.
    """
    found = []
    for path in sorted((folder or record.RESULTS).glob("*.json")):
        if path.name == SESSION:
            continue
        try:
            run = read_file(path)
            if "rehearsal" in run.environment:
                raise ValueError(f"{path.name} is of a rehearsal on a pretended GPU.")
            found.append(run)
        except ValueError as error:
            print(f"Left out: {error}", file=sys.stderr)
    return found


def of_text(text: str) -> Run:
    """The run in the text of a record. Raises ValueError, in one sentence, for what is none."""
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "This is not a run's record: its JSON breaks off or is malformed "
            f"({type(error).__name__})."
        ) from error
    if not isinstance(values, dict):
        raise ValueError("This is not a run's record: it holds no JSON object.")
    if wrong := sorted({item.name for item in fields(Run)} ^ set(values)):
        raise ValueError(
            f"This is not a complete record of version {VERSION}: "
            f"wrong or missing {clipped(', '.join(wrong))}."
        )
    if values["version"] != VERSION or isinstance(values["version"], bool):
        raise ValueError(
            f"This record has version {shown(values['version'])}; this code reads version "
            f"{VERSION}."
        )
    try:
        recipe = Recipe.from_dict(values["recipe"])
        check(values, recipe)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return Run.from_json(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError where it says something twice."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)


def check(values: Mapping[str, Any], recipe: Recipe) -> None:
    """Raises ValueError or TypeError, in one sentence, where fields make no whole run.

    values  the fields of a `Run` by name, as JSON holds them
    recipe  that of the run
    """
    name = of_type("name", values["name"], str)
    if name != UNNAMED and not NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} is no name for a run: use '<notebook>/<label>'.")
    _check_lists(values, recipe.steps, recipe.batch_size)
    if not 0 <= real("accuracy", values["accuracy"]) <= 1:
        raise ValueError(f"accuracy={values['accuracy']} must lie between 0 and 1.")
    for rows in ("train_rows", "test_rows"):
        whole(rows, values[rows], 1)
    if sum(values["seconds"]) > LONGEST:
        raise ValueError(f"seconds={shown(max(values['seconds']))} of a step: no run takes a year.")
    environment = _table("environment", values["environment"])
    device = of_type("environment['device']", environment.get("device"), str) or ""
    _check_memory(values["memory"], device)
    named = of_type("environment['name']", environment.get("name"), str) or ""
    if not named.strip():
        raise ValueError("environment['name'] is empty: a record names its device.")
    if device == "cuda":
        _check_fits(values["memory"], named)
    for key, value in environment.items():
        if value is not None and not isinstance(value, (str, int)):
            raise TypeError(f"environment[{shown(key)}]={shown(value)} must be a text or a number.")
    _check_plan(values["plan"])
    _check_date(values["date"])
    of_type("command", values["command"], str)


def _check_lists(values: Mapping[str, Any], steps: int, batch_size: int) -> None:
    for key in ("losses", "seconds", "rows", "skipped"):
        of_type(key, values[key], list)
    counts = [len(values[key]) for key in ("losses", "seconds", "rows")]
    if set(counts) != {steps}:
        raise ValueError(
            f"There are {counts[0]} losses, {counts[1]} times and {counts[2]} numbers of rows for "
            f"{steps} steps: half a run is no record."
        )
    for index in range(steps):
        real(f"losses[{index}]", values["losses"][index])
        real(f"seconds[{index}]", values["seconds"][index], above=0)
        whole(f"rows[{index}]", values["rows"][index], 1, batch_size)
    for index, step in enumerate(values["skipped"]):
        whole(f"skipped[{index}]", step, 0, steps - 1)
    if values["skipped"] != sorted(set(values["skipped"])):
        raise ValueError(f"skipped={shown(values['skipped'])} must name each step once, in order.")


def _check_memory(memory: Any, device: str) -> None:
    _table("memory", memory)
    whole("memory['tracked']", memory.get("tracked"), 1, BYTES)
    for name in ("allocated", "reserved", "device"):
        if name not in memory or memory[name] is None and device == "cuda":
            raise ValueError(
                f"memory[{name!r}] is missing: a run on {device} without its memory "
                "figures is no record."
            )
        if memory[name] is not None:
            whole(f"memory[{name!r}]", memory[name], 1, BYTES)
    _counts("memory['at_peak']", memory.get("at_peak"), BYTES)
    _check_figures("memory", {key: value for key, value in memory.items() if key not in KNOWN})


def _check_fits(memory: Mapping[str, Any], named: str) -> None:
    """Raises ValueError for memory that no allocator reports, or that the GPU does not have."""
    if memory["allocated"] > memory["reserved"]:
        raise ValueError(
            f"memory['allocated']={memory['allocated']:,} is more than "
            f"memory['reserved']={memory['reserved']:,}: an allocator gives what it has reserved."
        )
    most = max((gpu.memory for gpu in gpus.matches(named)), default=None)
    for name in ("allocated", "reserved"):
        if most is not None and memory[name] > most * SLACK_OF_GPUS:
            raise ValueError(
                f"memory[{name!r}]={memory[name]:,} is more than a {named} has ({most:,} bytes)."
            )


def _check_plan(plan: Any) -> None:
    _table("plan", plan)
    one_of("plan['target']", plan.get("target"), ("cpu", "cuda"))
    whole("plan['peak']", plan.get("peak"), 1, BYTES)
    for name in ("allocated", "reserved"):
        if name in plan:
            whole(f"plan[{name!r}]", plan[name], 1, BYTES)
    _counts("plan['at_peak']", plan.get("at_peak"), BYTES)
    _counts("plan['flops']", plan.get("flops"), FLOPS)
    _check_figures("plan", {key: value for key, value in plan.items() if key not in KNOWN})


def _check_figures(name: str, value: Any) -> None:
    """Raises ValueError or TypeError for a figure that no field explains and that cannot be one."""
    if isinstance(value, dict):
        for key, part in value.items():
            _check_figures(f"{name}[{shown(key)}]", part)
    elif value is not None and not isinstance(value, str):
        real(name, value, at_least=0)


def _check_date(date: Any) -> None:
    try:
        if not DATE.fullmatch(of_type("date", date, str)):
            raise ValueError
        when = datetime.fromisoformat(date)
    except ValueError:
        raise ValueError(
            f"date={shown(date)} must be in UTC and of the form 2026-11-22T15:30:00+00:00."
        ) from None
    if when.year < FIRST_YEAR or when > datetime.now(UTC) + SLACK:
        raise ValueError(f"date={date} lies before {FIRST_YEAR} or in the future.")


def _table(name: str, value: Any) -> dict:
    """A JSON object. Raises TypeError for anything else."""
    if not isinstance(value, dict):
        raise TypeError(f"{name}={shown(value)} must be an object of names and values.")
    return value


def _counts(name: str, value: Any, most: int) -> None:
    for key, count in _table(name, value).items():
        whole(f"{name}[{shown(key)}]", count, 0, most)
