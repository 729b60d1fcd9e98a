"""The plans of all points, as they were made last, beside what was measured.

Planning all of them takes half an hour, so planned.json keeps what came out; the tests plan some of
them again. `python -m benchmarks.peaks` makes the file and docs/accuracy.md anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peaks.point import Point
from benchmarks.peaks.points import LEFT_OUT, POINTS

PLANNED = Path(__file__).with_name("planned.json")
ALLOCATED, RESERVED = "allocated", "reserved"


@dataclass(frozen=True)
class Miss:
    """One figure of a point: `measured` and `planned` in bytes, `kind` "allocated" or "reserved".

    why  the reason for which it does not count, or ""
    """

    point: Point
    kind: str
    measured: float
    planned: int
    why: str

    @property
    def error(self) -> float:
        """planned / measured - 1"""
        return self.planned / self.measured - 1


def read() -> dict[str, dict[str, int]]:
    """{name of a point: {"allocated": bytes, "reserved": bytes}} by plan."""
    return json.loads(PLANNED.read_text(encoding="utf8")) if PLANNED.is_file() else {}


def make(
    points: Iterable[Point] = POINTS, report: Callable[[str], None] = lambda line: None
) -> None:
    """Plan points and keep the results; those of other points stay, those of none go."""
    known = {point.name for point in POINTS}
    for point in points:
        peaks = point.planned()
        results = {name: kept for name, kept in read().items() if name in known}
        results[point.name] = {ALLOCATED: peaks.allocated, RESERVED: peaks.reserved}
        ordered = {point.name: results[point.name] for point in POINTS if point.name in results}
        PLANNED.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf8")
        report(f"{point.name}: {peaks}")


def misses() -> list[Miss]:
    """Every published figure and its plan, in the order of `POINTS`.

    Points that are left out need no kept plan. Raises KeyError for another that has none.
    """
    kept = read()
    return [
        Miss(point, kind, measured, kept[point.name][kind], LEFT_OUT.get(point.name, ""))
        for point in POINTS
        if point.name in kept or point.name not in LEFT_OUT
        for kind, measured in ((ALLOCATED, point.allocated), (RESERVED, point.reserved))
        if measured is not None
    ]
