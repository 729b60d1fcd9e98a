"""`make test`: the tests, and the files of those that fail once more, each by itself.

The tests start ranks, kernels and a browser on the cores that they share, and which files follow
each other in a process differs from run to run. So a test may fail for its neighbours' sake. What
fails twice, the second time alone in a new process, is an error; what fails once is named at the
end, because it should be mended too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")  # pytest's own: {test: true}
TESTS_FAILED = 1  # pytest's exit status; the higher ones are errors of another kind
MOST = 20  # files: where more fail, no neighbour is to blame


def failed_files(folder: Path) -> list[str]:
    """The files of the tests that failed in the last run of pytest in `folder`."""
    try:
        failed = json.loads((folder / FAILED).read_text(encoding="utf8"))
    except FileNotFoundError:
        return []
    return sorted({test.partition("::")[0] for test in failed})


def run(paths: list[str], options: list[str], folder: Path = Path()) -> int:
    """Run pytest in `folder` on these paths, and failed files again. Gives the exit status."""
    command = [sys.executable, "-m", "pytest", *options]
    status = subprocess.call([*command, "--cache-clear", *paths], cwd=folder)
    files = failed_files(folder)
    files_there = all((folder / file).exists() for file in files)  # else a worker is named: gw1
    if status != TESTS_FAILED or not 0 < len(files) <= MOST or not files_there:
        return status
    print(f"\nAgain, each by itself: {', '.join(files)}", flush=True)
    again = [file for file in files if subprocess.call([*command, "-n0", file], cwd=folder)]
    for file in sorted({*files} - {*again}):
        print(f"{file} failed at first, and passed when it ran alone: it depends on others.")
    if again:
        print(f"Failed twice: {', '.join(again)}")
    return TESTS_FAILED if again else 0


if __name__ == "__main__":
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # PATH ... -- OPTION ...
    raise SystemExit(run(sys.argv[1:cut], sys.argv[cut + 1 :]))
