"""The table of docs/reliability.md: of how many mutants the tests say that something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pages import with_block
from tools.mutants.operators import NAME
from tools.mutants.sample import PARTS, ROOT

PAGE = ROOT / "docs" / "reliability.md"
HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
EQUIVALENT = HERE / "equivalent.json"  # {mutant: why nothing that a test may ask for differs}
HEAD = "| part | mutants | killed | without slow tests | equivalent | left |"


def name(row: dict) -> str:
    """What the mutant of a row is called."""
    return NAME.format_map(row)


def rows(results: Path = RESULTS) -> list[dict]:
    """What became of every mutant: of several lines of one mutant the last."""
    lines = results.read_text(encoding="utf8").splitlines()
    return list({name(row): row for row in map(json.loads, lines)}.values())


def table(found: list[dict], equivalent: set[str]) -> str:
    """One row per part, and one for all."""
    parts = dict.fromkeys(row["part"] for row in found)
    lines = [HEAD, "| --- | --- | --- | --- | --- | --- |"]
    for part in [*parts, None]:
        some = [row for row in found if part in (None, row["part"])]
        killed = [row for row in some if row["killed"]]
        early = [row for row in killed if row["tier"] == 1]
        same = [row for row in some if not row["killed"] and name(row) in equivalent]
        left = len(some) - len(killed) - len(same)
        cells = [part or "all", len(some), len(killed), len(early), len(same), left]
        lines.append(f"| {' | '.join(f'**{c}**' if part is None else str(c) for c in cells)} |")
    return "\n".join(lines)


def write() -> str:
    """Write the table, and give it."""
    equivalent = set(json.loads(EQUIVALENT.read_text(encoding="utf8")))
    text = table(found := rows(), equivalent)
    if len(found) < (wanted := sum(wanted for wanted, _ in PARTS.values())):
        text += f"\n\n{len(found)} of the {wanted} mutants of the sample have run so far."
    left = [row for row in found if not row["killed"] and name(row) not in equivalent]
    if few := sum(row["tier"] < 2 for row in left):
        text += (
            f"\n\nOf those that are left, {few} have not met every test that reaches their line."
        )
    dates = sorted({row.get("date", "an earlier day") for row in found if row["killed"]})
    text += f"\n\nWhat is killed was killed in the sources of {', '.join(dates)}."
    page = with_block(PAGE.read_text(encoding="utf8"), "mutants", text)
    PAGE.write_text(page, encoding="utf8")
    return text
