"""`make record` on a machine with a GPU: everything that a GPU can show, in order of value.

First the steps of every technique beside their plans, bytes and seconds, then the lessons with the
full models. Each result is written as soon as it is there. A call that runs out of time leaves the
rest to the next call with the same folder, and says so.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from helpers.files import replace_all
from tools.course import ROOT
from tools.course.notebooks import Failed, OutOfTime
from tools.course.record import RESULTS, one_notebook, prepare

STATE, SUMMARY = "session.json", "summary.md"
SPARE = 20.0  # seconds of the time given that are kept for the summary
FIRST_GUESS = 60.0  # seconds that a notebook may take that has not been run here yet
# Lessons that show the most of a GPU come first: those whose claims are about its memory and time.
ORDER = ("04", "06", "02", "05", "07", "03", "19", "00", "01", "09", "10", "17", "18")


@dataclass
class Entry:
    """A notebook in a session.

    digest   of the notebook's source, so that a changed one runs again
    seconds  it took
    error    the first line of what went wrong, "" where its runs were kept
    """

    digest: str
    seconds: float
    error: str = ""


@dataclass
class SessionState:
    """What a session has done so far, as it is kept in its folder."""

    notebooks: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> SessionState:
        """The state in a folder; a new one where there is none, or none that can be read."""
        try:
            values = json.loads((folder / STATE).read_text(encoding="utf8"))
            return cls({name: Entry(**entry) for name, entry in values["notebooks"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Keep it."""
        replace_all(folder, {STATE: json.dumps(asdict(self), indent=1) + "\n"})


def session(paths: list[Path], minutes: float | None, out: Path | None, command: str) -> int:
    """Measure and record as much as fits into `minutes` (None: all), into `out` (None: results/).

    Returns the exit status: 1 where a step or a notebook failed. Raises ValueError without a GPU,
    and for a rehearsal on a pretended GPU that would write to results/.
    """
    from benchmarks import gpu_steps

    begun = time.monotonic() - (time.time() - psutil.Process().create_time())  # of the command
    until = float("inf") if minutes is None else begun + 60 * minutes - SPARE
    folder = prepare(out)
    state = SessionState.read(folder)
    print("Steps of every technique, planned and measured:", flush=True)
    steps = gpu_steps.measure_all(folder / "steps", command, until)
    if steps.left:
        print(f"    {len(steps.left)} steps are left for the next call.", flush=True)
    print("\nLessons with the full models:", flush=True)
    left = []
    for path in filter(writes_runs, in_order(paths)):
        if not run_one(path, folder, state, command, until):
            left.append(path.stem)
    text = summary(steps, state, left, folder, time.monotonic() - begun)
    replace_all(folder, {SUMMARY: text})
    print(f"\n{text}", flush=True)
    failed = bool(steps.failed) or any(entry.error for entry in state.notebooks.values())
    return int(failed)


def in_order(paths: list[Path]) -> list[Path]:
    """Notebooks in the order of their value, then by number."""
    rank = {number: place for place, number in enumerate(ORDER)}
    return sorted(paths, key=lambda path: (rank.get(path.name[:2], len(ORDER)), path.name))


def code(path: Path) -> list[str]:
    """The source of a notebook's code cells."""
    cells = json.loads(path.read_text(encoding="utf8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def writes_runs(path: Path) -> bool:
    """Whether a notebook has runs to record; those about several GPUs have none."""
    return any("record.run(" in source for source in code(path))


def digest(path: Path) -> str:
    """Of the source of a notebook's code cells."""
    return hashlib.sha256("\0".join(code(path)).encode()).hexdigest()[:16]


def run_one(path: Path, folder: Path, state: SessionState, command: str, until: float) -> bool:
    """Record a notebook, unless it has been; False where the time does not suffice."""
    before, key = state.notebooks.get(path.stem), digest(path)
    if before and before.digest == key and not before.error:
        return True
    guess = before.seconds if before else FIRST_GUESS
    if time.monotonic() + guess > until:
        return False
    begun, error = time.monotonic(), ""
    try:
        one_notebook(path, folder, "full", "cuda", command, until)
    except OutOfTime:
        taken = time.monotonic() - begun
        state.notebooks[path.stem] = Entry("", 1.5 * taken)  # it is begun again with more time
        state.write(folder)
        return False
    except Failed as failed:
        print(f"\n{failed}\n", flush=True)
        error = str(failed).splitlines()[0]
    state.notebooks[path.stem] = Entry(key, round(time.monotonic() - begun, 1), error)
    state.write(folder)
    return True


def summary(steps, state: SessionState, left: list[str], folder: Path, seconds: float) -> str:
    """What there is, what is missing, and what to do with it, in Markdown."""
    from benchmarks.proof import table

    lines = [f"# {steps.proof.environment['name']}, {seconds / 60:.1f} minutes", ""]
    lines += [
        f"{len(steps.proof.steps)} steps measured, {len(steps.large)} too large for this GPU."
    ]
    kept = [name for name, entry in state.notebooks.items() if entry.digest and not entry.error]
    lines += [f"{len(kept)} lessons recorded: {', '.join(sorted(kept)) or 'none yet'}."]
    wrong = steps.failed | {name: e.error for name, e in state.notebooks.items() if e.error}
    lines += [f"- FAILED: {name}: {error}" for name, error in wrong.items()]
    missing = steps.left + left
    if missing:
        lines += [
            f"- Left for another call: {_some(steps.left, 'steps')}, {_some(left, 'lessons')}."
        ]
    lines += ["", _advice(folder, missing), ""]
    if steps.proof.steps:
        lines += [table(steps.proof).to_markdown(), ""]
    return "\n".join(lines)


def _some(names: list[str], what: str) -> str:
    shown = "; ".join(names[:3]) + ("; ..." if len(names) > 3 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")


def _advice(folder: Path, missing: list[str]) -> str:
    again = "Call it again to go on. " if missing else ""
    if folder.resolve() == RESULTS:
        return (
            f"{again}Then run `make notebooks readme` and commit results/, notebooks/, README.md."
        )
    return (
        f"{again}Then `python -m tools.course keep {_short(folder)}` checks these files and copies "
        "them to results/; after it run `make notebooks readme`, and commit all of it."
    )


def _short(folder: Path) -> str:
    whole = folder.resolve()
    return str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else str(folder)


def keep(folder: Path, results: Path = RESULTS) -> list[str]:
    """Copy what a session wrote from its folder to results/, all of it or nothing; the new names.

    Raises ValueError, in one sentence, where there is nothing, and for a file that is no record of
    a GPU, or one of a rehearsal.
    """
    from benchmarks.proof import Proof
    from helpers.record import read_file
    from tools.course.record import filename

    runs, proofs = {}, {}
    for path in sorted(folder.glob("*.json")):
        if path.name != STATE:
            run = read_file(path)
            _real(path, run.environment)
            runs[filename(run)] = run.to_json()
    for path in sorted([*folder.glob("steps/*.unfinished"), *folder.glob("steps/*.json")]):
        try:
            proof = Proof.from_json(path.read_text(encoding="utf8"))
        except UnicodeDecodeError:
            raise ValueError(
                f"{path.name} is no file of measured steps: it is not UTF-8."
            ) from None
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
        _real(path, proof.environment)
        proofs[f"{path.stem}.json"] = proof.to_json()
    if not runs and not proofs:
        raise ValueError(f"{folder} holds no result of a session: name the folder given to --out.")
    if proofs:
        replace_all(results / "steps", proofs)
    if runs:
        replace_all(results, runs)
    return [*runs, *(f"steps/{name}" for name in proofs)]


def _real(path: Path, environment: dict) -> None:
    if environment.get("rehearsal"):
        raise ValueError(f"{path.name} is of a rehearsal on a pretended GPU: it is no record.")
    if environment.get("device") != "cuda":
        raise ValueError(f"{path.name} was not taken on a GPU: it is no record.")
