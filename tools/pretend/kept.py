"""docs/rehearsal.json: what was rehearsed last, each notebook and `make record` on each GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from tight_fit.files import replace_all
from tools.course import ROOT
from tools.pretend import build

FILE = ROOT / "docs" / "rehearsal.json"


@dataclass
class Rehearsed:
    """One notebook on one kind and number of GPUs.

    cells    code cells
    ran      those that ran to their end
    excused  {number of a code cell: why it may fail}, of those that failed
    failed   {number of a code cell: the error}, of the others
    seconds  wall-clock
    """

    notebook: str
    card: str
    count: int
    cells: int
    ran: int
    seconds: float
    excused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class Recorded:
    """`make record` on one kind and number of GPUs, called until nothing was left for another call.

    minutes  given to each call
    seconds  that each call took, wall-clock
    steps    measured beside their plans
    off      of these, the furthest of allocated bytes from their plan, as a fraction of them
    lessons  whose runs were recorded
    failed   the summary's lines about steps and lessons that failed
    left     whether the last call still left something
    """

    card: str
    count: int
    minutes: int
    seconds: list[float]
    steps: int
    off: float
    lessons: int
    failed: list[str] = field(default_factory=list)
    left: bool = False


@dataclass
class Kept:
    """All of it."""

    notebooks: list[Rehearsed] = field(default_factory=list)
    records: list[Recorded] = field(default_factory=list)


def read() -> Kept:
    """What was rehearsed last."""
    if not FILE.exists():
        return Kept()
    values = json.loads(FILE.read_text(encoding="utf8"))
    return Kept(
        [Rehearsed(**row) for row in values["notebooks"]],
        [Recorded(**row) for row in values["records"]],
    )


def keep(result: Rehearsed | Recorded) -> None:
    """Keep a result in the place of an older one of the same notebook, card and number."""
    with build.alone("kept"):
        kept = read()
        if isinstance(result, Rehearsed):
            kept.notebooks = _with(kept.notebooks, result)
        else:
            kept.records = _with(kept.records, result)
        replace_all(FILE.parent, {FILE.name: json.dumps(asdict(kept), indent=1) + "\n"})


def _with(rows: list, result: Rehearsed | Recorded) -> list:
    return sorted([row for row in rows if _key(row) != _key(result)] + [result], key=_key)


def _key(row: Rehearsed | Recorded) -> tuple:
    name = row.notebook if isinstance(row, Rehearsed) else ""
    return name[:2], name, row.card, row.count
