"""Answers that are kept: those given before on this machine, and those that come with the package.

An answer is found again for the same question with the same versions of the libraries and of this
package's code. What comes with the package says which versions it was made with.
"""

from __future__ import annotations

import contextlib
import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from tight_fit.command import question
from tight_fit.command.question import Question
from tight_fit.files import of_user, replace_all
from tight_fit.gpus import calibration
from tight_fit.gpus.names import of_size

SHIPPED = Path(__file__).parent / "known" / "answers.json.xz"
MOST = 400  # answers that are kept; the oldest go first

Facts = dict[str, Any]


def folder() -> Path:
    """The folder of kept answers, below the user's cache directory."""
    return of_user("XDG_CACHE_HOME", "~/Library/Caches", "~/.cache") / "plans"


def find(asked: Question) -> Facts | None:
    """The answer to a question where it is kept, None elsewhere."""
    return _on_this_machine(asked) or shipped(asked)


def keep(asked: Question, facts: Facts) -> None:
    """Keep an answer. A folder that cannot be written keeps nothing, and that is no error."""
    place = _file(asked)
    with contextlib.suppress(OSError):
        replace_all(place.parent, {place.name: json.dumps(facts)})
        old = sorted(place.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-MOST]
        for file in old:
            file.unlink(missing_ok=True)


def _file(asked: Question) -> Path:
    parts = [asked.plain, question.versions(), question.code(), asked.quick, _measured(asked)]
    return folder() / f"{question.digest(parts)}.json"


def _measured(asked: Question) -> list[Any] | None:
    """What was measured of the GPU that is asked about, or of one of its size; None where nothing
    was: then its time is the table's, as in the answers that come with the package.

    Raises ValueError or OSError where the file of a calibration cannot be used.
    """
    own = calibration.active() if asked.gpu is not None else None
    if own is None or asked.gpu is None:
        return None
    by_size = [gpu.name for gpu in of_size(asked.gpu)]
    return list(own.specs) if own.gpu.name in (asked.gpu.name, *by_size) else None


def _on_this_machine(asked: Question) -> Facts | None:
    try:
        facts = json.loads(_file(asked).read_text(encoding="utf8"))
    except (OSError, ValueError):  # there is none, or it is damaged: it is made anew
        return None
    return facts if isinstance(facts, dict) and "peak" in facts else None


def shipped(asked: Question) -> Facts | None:
    """The answer that comes with the package; it says so ("shipped"), and what made it.

    Of a GPU that was calibrated there is none.
    """
    if _measured(asked) is not None:
        return None
    try:
        kept = _shipped()
    except (OSError, ValueError, lzma.LZMAError):  # a copy of the package without the file
        return None
    answer = kept["answers"].get(asked.key)
    if answer is None:
        return None
    source = {"shipped": True, "planned_with": kept["versions"]}
    return kept["plans"][answer["plan"]] | answer["facts"] | source


@cache
def _shipped() -> dict[str, Any]:
    return json.loads(lzma.decompress(SHIPPED.read_bytes()))
