"""Lessons and labs on a pretended GPU, cell by cell, with a table of what ran and what did not.

A cell that fails does not stop its notebook, so that one run finds all that is wrong. Cells in
`EXCUSED` may fail: what they claim is about sizes, accuracies or times that a rehearsal lacks.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from tight_fit.gpus import REHEARSAL, VISIBLE
from tools.course import ROOT
from tools.course.execute import COLOURS, QUIET, Line, client_for, failures, runs
from tools.course.notebooks import Failed
from tools.pretend import build, mirror

STARTUP = Path(__file__).resolve().parent / "startup"
WORK = ROOT / "build"  # two folders below the course: a notebook looks no further up for it
CAUSE = re.compile(r"(?:\[rank\d+\]: *)?(\w*(?:Error|Exception)\b.*)")  # in a rank's output
# {notebook: {words of the cell's source: why a rehearsal cannot have it}}
NO_PRETRAINING = "the mirror's weights are random, so that pretrained ones are no better"
EXCUSED: dict[str, dict[str, str]] = {
    "01_pretrained_vs_scratch_lab": {
        'assert best["pretrained"] > best["random"]': NO_PRETRAINING,
        'assert mean[label, "pretrained"] > mean[label, "random"]': NO_PRETRAINING,
        "assert reached < fast.accuracy - 0.2": NO_PRETRAINING,
        "assert most >= 4 * STEPS and starved <": NO_PRETRAINING,
        "assert abs(one_head - own_head) < 0.06": (
            "two accuracies are compared to 6 points, and each of 24 test images is worth 4"
        ),
        "assert statistics.mean(shuffled) <": NO_PRETRAINING,
        "assert max(rates.values()) < goal - 0.2": NO_PRETRAINING,
    },
}


@dataclass
class Rehearsed:
    """What became of a notebook's code cells.

    cells    how many there are
    ran      those that ran to their end
    excused  {number of a code cell: why it may fail}, of those that failed
    failed   {number of a code cell: the error}, of the others
    """

    cells: int
    ran: int = 0
    excused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def environment(card: str, count: int) -> dict[str, str]:
    """Variables of a process that shall believe in `count` GPUs of a kind; builds what it needs.

    Raises build.CannotCompile where the pretended GPU cannot be had.
    """
    build.library()
    paths = [str(STARTUP), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        REHEARSAL: f"{card}:{count}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TIGHT_FIT_MIRROR": str(mirror.folder()),
        "TIGHT_FIT_PROFILE": "",
        "TIGHT_FIT_RUNS": "",
        "TIGHT_FIT_COMMAND": f"a rehearsal on {count} pretended {card}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        VISIBLE: ",".join(map(str, range(count))),
    }


def rehearse(path: Path, card: str, count: int, folder: Path | None = None) -> Rehearsed:
    """Execute a notebook on pretended GPUs, all cells whatever fails. Prints a line of progress.

    folder  where the kernel runs; None takes one in build/, which is then thrown away: the course
            is found from there, and what cells write is gone
    """
    if folder is None:
        WORK.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WORK, prefix="pretended-") as made:
            return rehearse(path, card, count, Path(made))
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if runs(cell)]
    line = Line(path.stem, len(code))
    client = client_for(
        notebook,
        folder,
        allow_errors=True,
        on_cell_start=line.start,
        on_cell_executed=line.step,
    )
    result = Rehearsed(len(code))
    try:
        with failures(client, path, line):
            client.execute(env={**os.environ, **QUIET, **environment(card, count)})
    except Failed as error:  # the kernel died, or a cell hung
        result.failed["0"] = str(error).splitlines()[0]
    finally:
        line.end()
    excuses = EXCUSED.get(path.stem, {})
    for number, cell in enumerate(code, 1):
        errors = [output for output in cell.get("outputs", ()) if output.output_type == "error"]
        if not errors:
            result.ran += cell.get("execution_count") is not None
            continue
        reason = next((why for words, why in excuses.items() if words in cell.source), None)
        (result.failed if reason is None else result.excused)[str(number)] = reason or _short(
            f"{errors[0].ename}: {COLOURS.sub('', errors[0].evalue)}"
        )
    return result


def _short(error: str) -> str:
    """The first line of an error and, of one that holds a rank's output, the rank's own error.

    Files of the course are named from its folder: what is kept tells nothing of this machine.
    """
    error = error.replace(f"{ROOT}{os.sep}", "")
    first, *rest = [line.strip() for line in error.strip().splitlines() if line.strip()]
    causes = [found[1] for line in rest if (found := CAUSE.match(line))] or rest
    return " ... ".join(line[:200] for line in dict.fromkeys((first, *causes[-1:])))
