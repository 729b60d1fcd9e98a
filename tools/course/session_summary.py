"""The end of a call of `make record`, in words: what there is, what failed, what is left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.course import ROOT
from tools.course.record import RESULTS
from tools.course.session_state import CallTime, SessionState, too_long

if TYPE_CHECKING:
    from benchmarks.measured_steps import Outcome


@dataclass(frozen=True)
class CallResult:
    """What a call did.

    steps   what became of the steps, None where they could not even begin
    broken  why the steps ended early, "" where they did not
    left    names of notebooks for which no time was left
    absent  why no notebook was run, "" where they could be
    limits  the call's time
    """

    steps: Outcome | None
    broken: str
    left: list[str]
    absent: str
    limits: CallTime

    def failed(self, state: SessionState) -> dict[str, str]:
        """{name of a step or notebook: why it failed}"""
        wrong = {"the steps": self.broken} if self.broken else {}
        wrong |= self.steps.proof.failed if self.steps else {}
        for name, entry in state.notebooks.items():
            if entry.error:
                wrong[name] = entry.error
            elif too_long(entry, self.limits):
                wrong[name] = (
                    f"it was stopped after {entry.seconds / 60:.1f} minutes, all that such a call "
                    "can give: call with twice the MINUTES"
                )
        return wrong


def summary(told: CallResult, state: SessionState, folder: Path, seconds: float) -> str:
    """What there is, what is missing, and what to do with it, in Markdown."""
    steps, lines = told.steps, [f"# {state.machine}, {seconds / 60:.1f} minutes", ""]
    waiting: list[str] = []
    if steps:
        from benchmarks.measured_steps import name_of

        lines += [
            f"{len(steps.proof.steps)} steps measured, {len(steps.proof.large)} too large for this "
            f"GPU. {steps.note}".strip()
        ]
        put_off = [name_of(case) for case in steps.put_off]
        waiting = steps.left + [name for name in put_off if name not in steps.proof.failed]
    kept = [name for name, entry in state.notebooks.items() if entry.digest and not entry.error]
    lines += [f"{len(kept)} lessons recorded: {', '.join(sorted(kept)) or 'none yet'}."]
    wrong = told.failed(state)
    lines += [f"- FAILED: {name}: {error}" for name, error in wrong.items()]
    left = [name for name in told.left if name not in wrong]
    if told.absent:
        lines += [f"- Left out: {told.absent}."]
    if waiting or left:
        lines += [f"- Left for another call: {_some(waiting, 'steps')}, {_some(left, 'lessons')}."]
    lines += ["", _advice(folder, waiting + left), ""]
    if steps and steps.proof.steps:
        from benchmarks import markdown
        from benchmarks.proof import table

        lines += [markdown.of(table(steps.proof)), ""]
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
