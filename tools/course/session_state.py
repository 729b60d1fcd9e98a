"""What `make record` has done on a machine so far, and what it may begin in the time left."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tight_fit.files import replace_all
from tools.course.records import SESSION as STATE

FIRST_GUESS = 60.0  # seconds that a notebook may take that has not been run here yet


@dataclass
class Entry:
    """A notebook in a session.

    digest   of the notebook's source, so that a changed one runs again; "" where it was stopped
    seconds  it took, to its end or until it was stopped
    error    the first line of what went wrong, "" where its runs were kept, or it was stopped
    """

    digest: str
    seconds: float
    error: str = ""


@dataclass
class SessionState:
    """What has been done so far on one machine, as it is kept in the session's folder.

    machine    its GPU, driver and versions (`benchmarks.proof.machine`)
    notebooks  {name: what became of it}
    others     {another machine: its notebooks}, which used the same folder
    """

    machine: str
    notebooks: dict[str, Entry] = field(default_factory=dict)
    others: dict[str, dict[str, Entry]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, machine: str) -> SessionState:
        """The state in a folder; a new one where there is none, or none that can be read."""
        try:
            values = json.loads((folder / STATE).read_text(encoding="utf8"))
            others = {
                name: {notebook: Entry(**entry) for notebook, entry in entries.items()}
                for name, entries in values["machines"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            others = {}
        return cls(machine, others.pop(machine, {}), others)

    def write(self, folder: Path) -> None:
        """Keep it, with the other machines' notebooks."""
        every = self.others | {self.machine: self.notebooks}
        machines = {
            name: {notebook: asdict(entry) for notebook, entry in entries.items()}
            for name, entries in every.items()
        }
        replace_all(folder, {STATE: json.dumps({"machines": machines}, indent=1) + "\n"})


@dataclass(frozen=True)
class CallTime:
    """The time of a call: the moment (time.monotonic) at which all ends, and the seconds that a
    call of the same length can give to one notebook."""

    until: float = float("inf")
    whole: float = float("inf")


def guess(before: Entry | None, limits: CallTime) -> float:
    """Seconds that must be left for a notebook to begin, never more than a whole call can give.

    One that was stopped gets half as much again as it had.
    """
    if before is None:
        return min(FIRST_GUESS, limits.whole)
    return min(before.seconds if before.digest else 1.5 * before.seconds, limits.whole)


def too_long(before: Entry | None, limits: CallTime) -> bool:
    """Whether a notebook was stopped though it had all the time that such a call can give."""
    return before is not None and not before.digest and before.seconds >= limits.whole
