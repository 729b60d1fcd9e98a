"""`make record` on a machine with a GPU: everything that a GPU can show, in order of value.

First the steps of every technique beside their plans, bytes and seconds, then steps of other
people's models, then the lessons with the full models. Each result is written as soon as it is
there. A call that runs out of time leaves the rest to the next call with the same folder, and says
so.
"""

from __future__ import annotations

import hashlib
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tight_fit.files import replace_all
from tools.course import ROOT
from tools.course.notebooks import Failed, OutOfTime
from tools.course.record import RESULTS, one_notebook, prepare
from tools.course.records import SESSION

if TYPE_CHECKING:
    from benchmarks.measured_steps import Case, Outcome

SUMMARY = "summary.md"
SPARE = 20.0  # seconds of the time given that are kept for the summary
FIRST_GUESS = 60.0  # seconds that a notebook may take that has not been run here yet
JUPYTER = ("nbclient", "nbformat", "jupyter_client", "ipykernel", "zmq")
# Lessons that show the most of a GPU come first: those whose claims are about its memory and time.
ORDER = ("04", "06", "02", "05", "07", "03", "19", "00", "01", "09", "10", "17", "18")
# {notebook: {"digest" of its code, "" where it was stopped; "seconds"; "error", "" for none}}
Done = dict[str, dict[str, Any]]


def session(paths: list[Path], minutes: float | None, out: Path | None, command: str) -> int:
    """Measure and record as much as fits into `minutes` (None: all), into `out` (None: results/).

    Returns the exit status: 1 where a step or a notebook failed. Raises ValueError without a GPU,
    and for a rehearsal on a pretended GPU that would write to results/.
    """
    begun = time.monotonic() - (time.time() - psutil.Process().create_time())  # of the command
    until = float("inf") if minutes is None else begun + 60 * minutes - SPARE
    folder, machine = prepare(out), this_machine()
    machines = read_state(folder)
    done = machines.setdefault(machine, {})
    print("Steps of every technique, planned and measured:", flush=True)
    steps, broken = measured(folder, command, until)
    others = other_models(folder, command, until)
    left, absent = [], [name for name in JUPYTER if find_spec(name) is None]
    print("\nLessons with the full models:", flush=True)
    for path in [] if absent else in_order(list(filter(writes_runs, paths)), done):
        if not run_one(path, folder, done, command, until):
            left.append(path.stem)
        replace_all(folder, {SESSION: json.dumps({"machines": machines}, indent=1) + "\n"})
    if steps and steps.put_off:
        print("\nSteps that failed before, and those that waited for them:", flush=True)
        last, broken = measured(folder, command, until, steps.put_off)
        if last:
            last.left = [*steps.left, *last.left]
            steps = last
    wrong = {"the steps": broken} if broken else {}
    wrong |= steps.proof.failed if steps else {}
    wrong |= {name: entry["error"] for name, entry in done.items() if entry["error"]}
    lines = [f"# {machine}, {(time.monotonic() - begun) / 60:.1f} minutes", ""]
    lines += summary(steps, done, wrong, left, folder)
    if absent:
        lines += [f"No lesson is run, as {', '.join(absent)} is not installed here."]
    text = "\n".join([*lines, others, ""])
    replace_all(folder, {SUMMARY: text})
    print(f"\n{text}", flush=True)
    return int(bool(wrong))


def this_machine() -> str:
    """Its GPU, driver and versions, in words."""
    from benchmarks.proof import machine
    from helpers.profile import environment

    return machine(environment("cuda"))


def read_state(folder: Path) -> dict[str, Done]:
    """{machine: what was done there} of the folder; empty where it cannot be read."""
    try:
        machines = json.loads((folder / SESSION).read_text(encoding="utf8"))["machines"]
        return {name: {**entries} for name, entries in machines.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def summary(
    steps: Outcome | None, done: Done, wrong: dict[str, str], left: list[str], folder: Path
) -> list[str]:
    """What there is, what is missing, and what to do with it, as lines of Markdown."""
    lines, waiting = [], []
    if steps:
        from benchmarks import markdown
        from benchmarks.measured_steps import name_of
        from benchmarks.proof import table

        proof = steps.proof
        lines += [
            f"{len(proof.steps)} steps measured, {len(proof.large)} too large for this GPU. "
            f"{steps.note}".strip()
        ]
        put_off = [name_of(case) for case in steps.put_off]
        waiting = steps.left + [name for name in put_off if name not in proof.failed]
    kept = sorted(name for name, entry in done.items() if entry["digest"] and not entry["error"])
    lines += [f"{len(kept)} lessons recorded: {', '.join(kept) or 'none yet'}."]
    lines += [f"- FAILED: {name}: {error}" for name, error in wrong.items()]
    if waiting or left:
        lines += [f"- Left for another call: {'; '.join(waiting + left)}. Call it again to go on."]
        ended = {name: entry["seconds"] / 60 for name, entry in done.items() if not entry["digest"]}
        stopped = [f"{name} ({ended[name]:.1f} min)" for name in left if name in ended]
        lines += [f"- Stopped; give more MINUTES: {', '.join(stopped)}."] if stopped else []
    if folder.resolve() == RESULTS:
        then = "run `make notebooks readme` and commit results/, notebooks/, README.md"
    else:
        whole = folder.resolve()
        short = whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else folder
        then = (
            f"`python -m tools.course keep {short}` checks these files and copies them to results/"
        )
    lines += ["", f"When all is done, {then}.", ""]
    if steps and steps.proof.steps:
        lines += [markdown.of(table(steps.proof)), ""]
    return lines


def measured(
    folder: Path, command: str, until: float, only: list[Case] | None = None
) -> tuple[Outcome | None, str]:
    """What `measured_steps.measure_all` did, and why it ended before its end.

    Whatever it raises, the lessons have to run, and the summary has to be written.
    """
    try:
        from benchmarks import measured_steps

        return measured_steps.measure_all(folder / "steps", command, until, only), ""
    except Exception as error:
        print(f"    The steps ended early. {in_one_line(error)}", flush=True)
        return None, in_one_line(error)


def other_models(folder: Path, command: str, until: float) -> str:
    """Measure steps of other people's models, and say in a line of the summary how many.

    Whatever it raises, the lessons have to run.
    """
    print("\nOther models:", flush=True)
    try:
        from benchmarks import gpu_models
        from benchmarks.gpu_model_cases import CASES

        kept = gpu_models.measure_all(folder / "models", command, until)
    except Exception as error:
        print(f"    They ended early. {in_one_line(error)}", flush=True)
        return f"Other models ended early: {in_one_line(error)}"
    done, failed = len(kept["steps"]), len(kept["failed"])
    return f"{done} steps of other models measured, {failed} failed, {len(CASES) - done} left."


def in_one_line(error: Exception) -> str:
    """An error's kind and words."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def in_order(paths: list[Path], done: Done) -> list[Path]:
    """Notebooks in the order of their value, then by number; those that failed before come last."""
    rank = {number: place for place, number in enumerate(ORDER)}
    failed = {name for name, entry in done.items() if entry["error"]}
    return sorted(
        paths,
        key=lambda path: (path.stem in failed, rank.get(path.name[:2], len(ORDER)), path.name),
    )


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


def run_one(path: Path, folder: Path, done: Done, command: str, until: float) -> bool:
    """Record a notebook, unless it has been; False where the time does not suffice.

    One that was stopped begins again when there is half as much time again as it had.
    """
    before, key = done.get(path.stem), digest(path)
    if before and before["digest"] == key and not before["error"]:
        return True
    begun, error = time.monotonic(), ""
    guess = FIRST_GUESS
    if before:
        guess = before["seconds"] if before["digest"] else 1.5 * before["seconds"]
    if begun + guess > until:
        return False
    try:
        one_notebook(path, folder, "full", "cuda", command, until)
    except OutOfTime:
        key = ""
    except Failed as failed:
        print(f"\n{failed}\n", flush=True)
        error = str(failed).splitlines()[0]
    except Exception as other:  # it may not cost the lessons after it
        error = in_one_line(other)
        print(f"\n{path.name} failed. {error}\n", flush=True)
    seconds = round(time.monotonic() - begun, 1)
    done[path.stem] = {"digest": key, "seconds": seconds, "error": error}
    return bool(key)


def keep(folder: Path, results: Path = RESULTS) -> list[str]:
    """Copy what a session wrote from its folder to results/, all of it or nothing; the new names.

    Raises ValueError, in one sentence, where there is nothing, and for a file that is no record of
    a GPU, or one of a rehearsal.
    """
    from benchmarks.gpu_models import as_json, file_of
    from benchmarks.proof import Proof, write
    from tools.course.record import filename
    from tools.course.records import read_file

    runs, proofs, models = {}, [], {}
    for path in sorted(folder.glob("*.json")):
        if path.name != SESSION:
            run = read_file(path)
            _real(path, run.environment)
            runs[filename(run)] = run.to_json()
    # What is unfinished comes last: it holds all that was finished before it, and more.
    for path in [*sorted(folder.glob("steps/*.json")), *sorted(folder.glob("steps/*.unfinished"))]:
        try:
            proof = Proof.from_json(path.read_text(encoding="utf8"))
        except UnicodeDecodeError:
            raise ValueError(
                f"{path.name} is no file of measured steps: it is not UTF-8."
            ) from None
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
        _real(path, proof.environment)
        if proof.steps:
            proofs.append(proof)
    for path in sorted(folder.glob("models/*.json")):
        try:
            kept = json.loads(path.read_text(encoding="utf8"))
            name, text = file_of(kept["environment"]), as_json(kept)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name} is no file of measured models ({error}).") from None
        _real(path, kept["environment"])
        models[name] = text
    if not runs and not proofs and not models:
        raise ValueError(f"{folder} holds no result of a session: name the folder given to --out.")
    proofs.sort(key=lambda proof: proof.date)
    written = [write(proof, results / "steps") for proof in proofs]
    if runs:
        replace_all(results, runs)
    if models:
        replace_all(results / "models", models)
    steps = dict.fromkeys(f"steps/{path.name}" for path in written)
    return [*runs, *steps, *(f"models/{name}" for name in models)]


def _real(path: Path, environment: dict) -> None:
    if environment.get("rehearsal"):
        raise ValueError(f"{path.name} is of a rehearsal on a pretended GPU: it is no record.")
    if environment.get("device") != "cuda":
        raise ValueError(f"{path.name} was not taken on a GPU: it is no record.")
