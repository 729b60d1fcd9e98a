"""`python -m tools.versions`: three sets of releases that readers meet, each tried by itself.

lowest  the lowest release that each line of requirements.txt allows
newest  the newest of each
colab   what Colab has installed, from the list that it publishes, then what the first cell of a
        notebook brings

Each set gets an environment of its own in build/versions and goes through `CHECKS` there. What
passed, with the date and the releases, is kept in docs/data/versions.json, and docs/reliability.md
has its table. An environment that is there is used again. Of PyTorch, $TORCH_INDEX names an index
with its build for CPUs, as for `make`. Imports nothing outside Python itself and this project.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import with_block
from tight_fit.command.arguments import OneLineParser
from tight_fit.command.wrapper import run as run_command
from tight_fit.files import replace_all

NAME = "python -m tools.versions"
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
KEPT = ROOT / "docs" / "data" / "versions.json"
PAGE = ROOT / "docs" / "reliability.md"
SETS = ("lowest", "newest", "colab")
# What the checks need beside requirements.txt, of requirements-dev.txt.
TESTING = (
    "pytest pytest-timeout pytest-xdist hypothesis nbval nbclient nbconvert nbformat scipy pyyaml"
).split()
# Those whose releases the table names. Adapters depend on torchao, and 8 bits are compared with it.
NAMED = ("torch", "transformers", "peft", "torchao", "bitsandbytes", "lightning-fabric", "numpy")
# Colab has these beside what requirements.txt names, and libraries of it look for them.
BESIDE = ("torchao", "torchvision")
# Where the course meets other libraries: checkpointing, LoRA, Fabric and bitsandbytes.
LESSONS = ("06", "07", "11", "21")
# The tests whose subject is what other libraries do, most of them.
TESTS = (
    "core/test_lora.py core/test_optimizers.py plans/test_hf_model.py techniques/test_four_bits.py "
    "techniques/test_base_weights.py techniques/test_offload.py techniques/test_eight_bits.py"
).split()
NBVAL = (
    "--nbval-lax --nbval-current-env --nbval-cell-timeout=1500 --nbval-sanitize-with"
    " tests/sanitize.cfg"
).split()
COLUMNS = (f"lessons {', '.join(LESSONS)}", "fast tests", "first cells")


def floors(text: str) -> list[str]:
    """["torch==2.11", ...]: the lowest releases that the lines of a requirements file allow.

    Raises ValueError for a line that names no lowest release.
    """
    found = []
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        match = re.match(r"([\w.-]+)>=([\w.]+)", line)
        if match is None:
            raise ValueError(f"{line!r} names no lowest release: write it as name>=release.")
        found.append(f"{match[1]}=={match[2]}")
    return found


def pins(text: str) -> dict[str, str]:
    """{package: release} of a list as `pip freeze` prints it, without the names of builds.

    What was installed from a file or an address has no release there and is left out, and so are
    the libraries of CUDA, as torch brings those of its own build.
    Raises ValueError where the list pins no torch: then it is none of Colab's.
    """
    found = dict(re.findall(r"^(?!nvidia-|cuda-)([\w.-]+)==([\w.!]+)(?:\+\S*)?$", text, re.M))
    if "torch" not in found:
        raise ValueError("the list pins no torch: name a file that `pip freeze` wrote (COLAB=).")
    return found


class Environment:
    """A set's environment. Raises OSError and RuntimeError with pip's words where it fails."""

    def __init__(self, name: str, colab: str | None):
        self.name, self.folder = name, FOLDER / name
        self.python = self.folder / "env" / "bin" / "python"
        self.variables = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        if name == "colab":
            self.variables["COLAB_RELEASE_TAG"] = "release"
        if not (self.folder / "ready").is_file():
            self._make(colab)

    def _make(self, colab: str | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", self.folder / "env"], check=True)
        text = (ROOT / "requirements.txt").read_text(encoding="utf8")
        wanted, limits = ["-r", "requirements.txt"], list[str]()
        if self.name == "lowest":
            limits = floors(text)
        elif self.name == "newest":
            wanted.append("torchao")  # which the tested releases do without
        elif colab is not None:
            there = pins(colab)
            limits = [f"{name}=={release}" for name, release in there.items()]
            needed = [pin.partition("==")[0] for pin in floors(text)]
            wanted = [name for name in (*needed, *BESIDE) if name in there]
        (self.folder / "limits.txt").write_text("\n".join(limits), encoding="utf8")
        limited = ["-c", str(self.folder / "limits.txt")]
        if index := os.environ.get("TORCH_INDEX"):
            self._pip("--no-deps", *limited, "torch", PIP_INDEX_URL=index)
        self._pip(*wanted, *limited)
        dev = (ROOT / "requirements-dev.txt").read_text(encoding="utf8").splitlines()
        self._pip(*(line for line in dev if re.split("[>;]", line)[0] in TESTING), *limited)
        if self.name == "colab":  # as a reader's first cell does
            first = "from helpers import setup; raise SystemExit(not setup.install())"
            if self.run("-c", first).returncode:
                raise RuntimeError("the first cell found no network to install what is missing")
        (self.folder / "ready").touch()

    def _pip(self, *arguments: str, **variables: str) -> None:
        install = ["-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
        done = self.run(*install, *arguments, **variables)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise RuntimeError(" ".join(said)[:500] or f"pip ended with {done.returncode}")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the set's Python in the project's folder; stdout goes where this process's goes."""
        return subprocess.run(
            [self.python, *arguments],
            cwd=ROOT,
            env={**os.environ, **self.variables, **variables},
            stderr=subprocess.PIPE,
            text=True,
        )

    def releases(self) -> dict[str, str]:
        """{"Python": "3.11.9", "torch": "2.11.0", ...}; packages that are missing are left out."""
        code = (
            "import importlib.metadata as m, json, platform\n"
            "there = {d.metadata['Name']: d.version.split('+')[0] for d in m.distributions()}\n"
            f"found = {{n: there[n] for n in {NAMED!r} if n in there}}\n"
            "print(json.dumps({'Python': platform.python_version(), **found}))"
        )
        said = subprocess.run([self.python, "-c", code], stdout=subprocess.PIPE, check=True)
        return json.loads(said.stdout)

    def tested(self, check: str, jobs: int, *arguments: str) -> dict[str, Any]:
        """{"passed": number, "skipped": number, "failed": names} of a run of pytest."""
        report = self.folder / f"{check.partition(' ')[0]}.xml"
        report.unlink(missing_ok=True)
        done = self.run(
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(jobs)),
            *("--dist", "loadfile", f"--junitxml={report}", *arguments),
        )
        if not report.is_file():
            return {"passed": 0, "skipped": 0, "failed": [f"pytest ended with {done.returncode}"]}
        return counted(report.read_text(encoding="utf8"))


def counted(report: str) -> dict[str, Any]:
    """What `Environment.tested` returns, of a report of pytest in JUnit's XML."""
    kinds: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for case in xml.fromstring(report).iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        place = f"{case.get('classname')}::{case.get('name')}"
        kinds[kind].append(place.removeprefix("build."))
    return {
        "passed": len(kinds["passed"]),
        "skipped": len(kinds["skipped"]),
        "failed": sorted(set(kinds["failed"])),
    }


def copies(folder: str, numbers: tuple[str, ...] = (), code_cells: int | None = None) -> list[str]:
    """Copies of lessons in a folder of build/: all, or those of these numbers, whole or no more
    than their first code cells. Outputs are not compared: a plan is one of the installed releases.
    """
    paths, place = [], ROOT / "build" / folder
    place.mkdir(parents=True, exist_ok=True)
    for lesson in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if numbers and lesson.name[:2] not in numbers:
            continue
        notebook = json.loads(lesson.read_text(encoding="utf8"))
        code = [at for at, cell in enumerate(notebook["cells"]) if cell["cell_type"] == "code"]
        end = len(notebook["cells"]) if code_cells is None else code[code_cells - 1] + 1
        notebook["cells"] = notebook["cells"][:end]
        for cell in notebook["cells"]:
            cell["metadata"].pop("tags", None)
        (place / lesson.name).write_text(json.dumps(notebook), encoding="utf8")
        paths.append(f"build/{folder}/{lesson.name}")
    return paths


def tried(name: str, colab: str | None, jobs: int) -> Iterator[dict[str, Any]]:
    """A set's entry of docs/data/versions.json, after each of its `COLUMNS`: {"date", "releases",
    and what `Environment.tested` returned for each check so far}."""
    today = datetime.date.today().isoformat()
    try:
        env = Environment(name, colab)
    except RuntimeError as error:
        yield {"date": today, "releases": {}, "install": str(error)}
        return
    fast = [f"tests/{part}" for part in TESTS]
    given = (
        [*NBVAL, *copies("lessons", LESSONS)],
        ["-m", "not slow and not night", *fast],
        [*NBVAL, *copies("first", code_cells=2)],
    )
    entry: dict[str, Any] = {"date": today, "releases": env.releases()}
    for check, arguments in zip(COLUMNS, given, strict=True):
        print(f"{name}: {check}", flush=True)
        entry[check] = env.tested(check, jobs, *arguments)
        yield entry


def table(kept: dict[str, Any]) -> str:
    """The Markdown of docs/reliability.md, and below it what failed, by name."""
    head = ("set", "releases", "tried on", *COLUMNS)
    rows = [head, ("---",) * len(head)]
    failed = []
    for name in filter(kept.get, SETS):
        entry = kept[name]
        there = entry["releases"]
        releases = ", ".join(f"{one} {there[one]}" for one in ("Python", *NAMED) if one in there)
        cells = [words(entry.get(check)) for check in COLUMNS]
        rows.append((name, releases or "could not be installed", entry["date"], *cells))
        failed += [
            f"- {name}: `{test}`"
            for check in COLUMNS
            for test in entry.get(check, {"failed": ()})["failed"]
        ]
        if "install" in entry:
            failed.append(f"- {name}: {entry['install']}")
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, *(["", "Not passed:", "", *failed] if failed else [])])


def words(found: dict[str, Any] | None) -> str:
    """One cell of the table."""
    if found is None:
        return "not tried"
    parts = [f"{found['passed']:,} passed"]
    parts += [f"{len(found['failed']):,} failed"] if found["failed"] else []
    parts += [f"{found['skipped']:,} skipped"] if found["skipped"] else []
    return ", ".join(parts)


def read() -> dict[str, Any]:
    """What docs/data/versions.json holds; nothing before the first set was tried."""
    return json.loads(KEPT.read_text(encoding="utf8")) if KEPT.is_file() else {}


def main(arguments: list[str] | None = None) -> int:
    """Try the sets and keep what passed. Returns 1 where anything failed."""
    parser = OneLineParser(prog=NAME, description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"{', '.join(SETS)} (all)")
    parser.add_argument("--colab", type=Path, help="Colab's pip-freeze.txt, for the set colab")
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the tests (2)")
    asked = parser.parse_args(arguments)
    sets = asked.sets or SETS
    for name in set(sets) - set(SETS):
        known = ", ".join(map(repr, SETS))
        parser.error(f"argument SET: invalid choice: {name!r} (choose from {known})")
    colab = None
    if "colab" in sets:
        if asked.colab is None:
            parser.error("the set colab needs Colab's list: give make COLAB=pip-freeze.txt.")
        colab = asked.colab.read_text(encoding="utf8")
        pins(colab)
    good = True
    for name in sets:
        for entry in tried(name, colab if name == "colab" else None, asked.jobs):
            kept = read() | {name: entry}
            text = json.dumps(kept, indent=1, sort_keys=True) + "\n"
            replace_all(KEPT.parent, {KEPT.name: text})
            replace_all(
                PAGE.parent,
                {PAGE.name: with_block(PAGE.read_text(encoding="utf8"), "versions", table(kept))},
            )
        failed = [check for check in COLUMNS if entry.get(check, {"failed": ["install"]})["failed"]]
        good = good and not failed
    print(table(read()))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(run_command(main, NAME))
