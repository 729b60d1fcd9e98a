"""What is kept of the programs (benchmarks/data/programs.json), and the table of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "programs.json"
RANDOM_STATE = 5056  # bytes of torch.get_rng_state(), one copy for each checkpointed layer
NUMBERS = 64  # bytes of numbers by which a CPU multiplies, as tests/script/test_programs.py says


def read() -> dict[str, Any]:
    """{"versions": {package: version}, "programs": [facts of each]}."""
    return json.loads(FILE.read_text(encoding="utf8"))


def write(facts: dict[str, Any]) -> None:
    """Keep the facts."""
    FILE.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf8")


def digest(script: Path) -> str:
    """The SHA-256 of a file, which tells its version."""
    return hashlib.sha256(script.read_bytes()).hexdigest()


def command(entry: dict[str, Any]) -> str:
    """The program with its arguments, as a user types it."""
    return f"{Path(entry['path']).name} {entry['arguments']}".strip()


def beside(entry: dict[str, Any]) -> int:
    """Real bytes of the last step without those planned."""
    return entry["real"][-1] - entry["planned"][-1]


def reason(entry: dict[str, Any]) -> str:
    """Why a real step took other bytes than planned; "" where it did not.

    Raises ValueError for a difference that has no known cause.
    """
    number = beside(entry)
    states, rest = divmod(number, RANDOM_STATE) if entry.get("checkpointing") else (0, number)
    if number < 0 or rest > NUMBERS or rest % 4:
        raise ValueError(f"{command(entry)}: {number:,} bytes beside the plan have no known cause.")
    causes = []
    if states:
        plural = "s" if states > 1 else ""
        causes.append(f"{states} state{plural} of the CPU's random numbers, for checkpointing")
    if rest:
        causes.append("numbers that a CPU makes tensors of")
    return ", ".join(causes)


def markdown() -> str:
    """The table of docs/checked-programs.md."""
    facts = read()
    lines = [
        "| repository | program | bytes planned | bytes of the real step | beside the plan |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for entry in facts["programs"]:
        where = f"{entry['repository']} {entry['version']}"
        why = reason(entry)
        lines.append(
            f"| {where} | `{command(entry)}` | {entry['planned'][-1]:,} | {entry['real'][-1]:,} | "
            f"{f'{beside(entry):,}: {why}' if why else '0'} |"
        )
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return "\n".join([*lines, "", f"Versions: {versions}."])


def miss(case: dict[str, Any]) -> float:
    """The relative error of the plan of a published case."""
    return case["planned"] / case["measured"] - 1


def published() -> str:
    """The table of published cases in docs/checked-programs.md."""
    lines = ["| case | planned | measured | |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {case['model']}, {case['batch']} × {case['length']} tokens | {case['planned']:,} | "
        f"{case['measured']:,} | {miss(case):+.2%} |"
        for case in read()["published"]["cases"]
    ]
    return "\n".join(lines)
