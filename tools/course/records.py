"""Records that are kept in results/: what their fields may hold, and what is refused.

A notebook writes what it measured. `make record` and `tools.course keep` let in here what makes a
whole run, so that whoever reads results/ need not ask again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import best_match

from helpers import record
from helpers.recipe import Recipe
from helpers.record import NAME, UNNAMED, VERSION, Run
from tight_fit import gpus
from tight_fit.checks import shown
from tight_fit.files import small_text

SESSION = "session.json"  # beside runs: what `make record` has done so far; it is no run
LARGEST = 1 << 26  # bytes of a record
SAID = 150  # characters of what the schema says
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")  # so that dates compare as text does
FIRST_YEAR = 2020  # before it there was no such course
SLACK = timedelta(days=1)  # by which clocks may differ
LONGEST = 366 * 86400.0  # seconds of a run
SLACK_OF_GPUS = 1.1  # GPUs of one name differ a little in what they have
_TEXT = Path(__file__).with_name("record.schema.json").read_text(encoding="utf8")
_INTEGERS = Draft202012Validator.TYPE_CHECKER.redefine(
    "integer",
    lambda _, value: isinstance(value, int) and not isinstance(value, bool),  # not 1.0
)
SCHEMA = validators.extend(Draft202012Validator, type_checker=_INTEGERS)(json.loads(_TEXT))


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
        values = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        wrong = best_match(SCHEMA.iter_errors(values))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "This is not a run's record: its JSON breaks off or is malformed "
            f"({type(error).__name__})."
        ) from error
    if wrong:
        first, *rest = wrong.absolute_path or ("its fields",)
        place = f"{first}{''.join(f'[{shown(part)}]' for part in rest)}"
        said = wrong.message.replace(repr(wrong.instance), shown(wrong.instance), 1)
        said = said if len(said) < SAID else f"{said[:SAID]}..."
        raise ValueError(f"This is no record of version {VERSION}: {place}: {said}.")
    try:
        check(values, Recipe.from_dict(values["recipe"]))
    except TypeError as error:
        raise ValueError(str(error)) from error
    return Run.from_json(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError where it says something twice."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)


def _no_number(name: str) -> NoReturn:
    """Raises ValueError for NaN and Infinity, which Python's JSON has beside the numbers."""
    raise ValueError(f"{name} is no number")


def check(values: Mapping[str, Any], recipe: Recipe) -> None:
    """Raises ValueError or TypeError, in one sentence, where fields together make no whole run.

    values  the fields of a `Run` by name, each as SCHEMA has it
    recipe  that of the run
    """
    name = values["name"]
    if name != UNNAMED and not NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} is no name for a run: use '<notebook>/<label>'.")
    counts = [len(values[key]) for key in ("losses", "seconds", "rows")]
    if set(counts) != {recipe.steps}:
        raise ValueError(
            f"There are {counts[0]} losses, {counts[1]} times and {counts[2]} numbers of rows for "
            f"{recipe.steps} steps: half a run is no record."
        )
    if max(values["rows"]) > recipe.batch_size:
        raise ValueError(f"rows has more than the {recipe.batch_size} examples of a batch.")
    skipped = values["skipped"]
    if skipped != sorted(skipped) or max(skipped, default=0) >= recipe.steps:
        raise ValueError(f"skipped={shown(skipped)} must name steps, in order.")
    if sum(values["seconds"]) > LONGEST:
        raise ValueError(f"seconds={shown(max(values['seconds']))} of a step: no run takes a year.")
    if values["environment"]["device"] == "cuda":
        _check_fits(values["memory"], values["environment"]["name"])
    _check_date(values["date"])


def _check_fits(memory: Mapping[str, Any], named: str) -> None:
    """Raises ValueError for memory that no allocator reports, or that the GPU does not have."""
    if missing := [name for name in ("allocated", "reserved", "device") if memory[name] is None]:
        raise ValueError(
            f"memory[{missing[0]!r}] is missing: a run on a GPU without it is no record."
        )
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


def _check_date(date: str) -> None:
    try:
        if not DATE.fullmatch(date):
            raise ValueError
        when = datetime.fromisoformat(date)
    except ValueError:
        raise ValueError(
            f"date={shown(date)} must be in UTC and of the form 2026-11-22T15:30:00+00:00."
        ) from None
    if when.year < FIRST_YEAR or when > datetime.now(UTC) + SLACK:
        raise ValueError(f"date={date} lies before {FIRST_YEAR} or in the future.")
