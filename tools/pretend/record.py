"""`make record` itself on a pretended GPU: the command as it is typed, until nothing is left.

Its files go to a folder that is thrown away. They are those of a rehearsal, which
`python -m tools.course keep` has to refuse.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.proof import Proof
from tools.course import ROOT, session
from tools.pretend.kept import Recorded
from tools.pretend.rehearse import WORK, environment

MOST_CALLS = 6
FAILED, LEFT = "- FAILED: ", "- Left for another call: "  # lines of the summary


def rehearse_record(card: str, count: int, minutes: int) -> Recorded:
    """Call `make record` with so many minutes each until its summary says that nothing is left.

    Raises RuntimeError where a call ends without its summary, or `keep` takes what it wrote.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(dir=WORK) as made:
        folder = Path(made) / "session"
        while len(seconds) < MOST_CALLS:
            begun = time.perf_counter()
            lines = _call(card, count, minutes, folder)
            seconds.append(round(time.perf_counter() - begun, 1))
            if not any(line.startswith(LEFT) for line in lines):
                break
        _check_refused(folder)
        return _recorded(Recorded(card, count, minutes, seconds, 0, 0.0, 0), folder, lines)


def _call(card: str, count: int, minutes: int, folder: Path) -> list[str]:
    """Lines of the summary after one more call."""
    variables = {**os.environ, **environment(card, count)}
    del variables["TIGHT_FIT_RUNS"], variables["TIGHT_FIT_COMMAND"]
    summary = folder / session.SUMMARY
    summary.unlink(missing_ok=True)
    command = ["make", "record", f"PY={sys.executable}", f"MINUTES={minutes}", f"OUT={folder}"]
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=sys.stderr, text=True)
    if not summary.exists():
        raise RuntimeError(f"`make record` ended with {done.returncode} and without a summary.")
    return summary.read_text(encoding="utf8").splitlines()


def _check_refused(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as results:
        try:
            session.keep(folder, Path(results))
        except ValueError:
            return
    raise RuntimeError("`keep` took the files of a rehearsal for records.")


def _recorded(found: Recorded, folder: Path, lines: list[str]) -> Recorded:
    """`found` with what the calls left in their folder."""
    paths = [*folder.glob("steps/*.json"), *folder.glob("steps/*.unfinished")]
    steps = [s for path in paths for s in Proof.from_json(path.read_text(encoding="utf8")).steps]
    machines = session.SessionState.read(folder, "").others.values()
    entries = [entry for notebooks in machines for entry in notebooks.values()]
    found.steps = len(steps)
    found.off = round(max((abs(step.miss) for step in steps), default=0.0), 4)
    found.lessons = sum(bool(entry.digest) and not entry.error for entry in entries)
    found.failed = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
    found.left = any(line.startswith(LEFT) for line in lines)
    return found
