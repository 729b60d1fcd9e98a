"""What ranks print and how they failed, read from the files that torchrun redirects both to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPORT = "torchrun.txt"  # what torchrun itself wrote, in the folder of its ranks
# The errors of ranks whose neighbour is gone, which are consequences.
GONE = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Timed out", re.IGNORECASE
)


class Failure(NamedTuple):
    """The first failure of a torchrun: when, which rank, its exit code (negative: a signal)."""

    time: str
    rank: int
    exitcode: int


class RankOutput:
    """What the ranks of some machines print.

    `texts` is what each rank has printed so far, in all attempts; `shown` how many of its
    characters were shown. torchrun writes over the files of an attempt that it does not count (one
    that another machine ended), so what was in them is kept here.

    folders  one per machine, which torchrun writes its logs to
    ranks    of each machine
    show     print each line as it comes, after "[rank] "
    """

    def __init__(self, folders: Sequence[Path], ranks: int, show: bool):
        self.folders, self.ranks, self.show = folders, ranks, show
        count = len(folders) * ranks
        self.texts, self.shown = [""] * count, [0] * count
        self._before, self._now = [""] * count, [""] * count  # written over, in the files

    def _read(self, rank: int, name: str) -> list[str]:
        """The text of each attempt."""
        machine, local = divmod(rank, self.ranks)
        files = self.folders[machine].glob(f"*/attempt_*/{local}/{name}.log")
        attempts = {int(file.parts[-3].removeprefix("attempt_")): file for file in files}
        return [attempts[number].read_text(errors="replace") for number in sorted(attempts)]

    def read(self) -> None:
        """Read all that has been printed by now, and show the lines that are complete."""
        for rank in range(len(self.texts)):
            now = "".join(self._read(rank, "stdout"))
            if not now.startswith(self._now[rank]):
                self._before[rank] += self._now[rank]
            self._now[rank] = now
            self.texts[rank] = self._before[rank] + now
            complete = self.texts[rank].rfind("\n") + 1
            if self.show and complete > self.shown[rank]:
                for line in self.texts[rank][self.shown[rank] : complete].splitlines():
                    print(f"[{rank}] {line}", flush=True)
            self.shown[rank] = max(complete, self.shown[rank])

    def errors(self, rank: int) -> str:
        """The rank's error output of its last attempt, from its last traceback on."""
        text = "".join(self._read(rank, "stderr")[-1:])
        # torch puts the rank before each line.
        text = re.sub(rf"^\[rank{rank}\]:? ?", "", text, flags=re.MULTILINE)
        begin = text.rfind("Traceback (most recent call last)")
        return text[max(begin, 0) :]

    def failure(self) -> tuple[int | None, int | None, str]:
        """(rank, exit code, what it wrote) of the failure that caused the others.

        Each machine reports its own first failure. A rank that only lost its neighbour is not the
        cause; of the others it is the earliest. Without a rank, the report of a machine.
        """
        reports = [(folder / REPORT).read_text(errors="replace") for folder in self.folders]
        found = [failed for report in reports if (failed := first_failure(report))]
        if not found:
            return None, None, next(filter(None, reports), "")
        first = min(found, key=lambda failed: (self._is_consequence(failed), failed))
        return first.rank, first.exitcode, self.errors(first.rank)

    def _is_consequence(self, failed: Failure) -> bool:
        return bool(GONE.search(self.errors(failed.rank)))


def first_failure(report: str) -> Failure | None:
    """The first failure in torchrun's report, or None."""
    cause = report[max(report.rfind("Root Cause"), 0) :]
    match = re.search(
        r"time\s*:\s*(\S+)\s.*?rank\s*:\s*(\d+)\s.*?exitcode\s*:\s*(-?\d+)", cause, re.DOTALL
    )
    return Failure(match[1], int(match[2]), int(match[3])) if match else None
