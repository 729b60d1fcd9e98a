"""docs/accuracy.md and README's sentences on accuracy, from the kept plans of published peaks.

data/accuracy.txt is the page, with names in braces where figures stand.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd

from benchmarks import markdown, torchtitan_steps
from benchmarks.comparison import Errors
from benchmarks.pages import DATA
from benchmarks.peaks import qwen_plans
from benchmarks.peaks.points import ALLOCATED, LEFT_OUT, RESERVED, misses
from benchmarks.peaks.qwen import SOURCE as QWEN
from helpers.tables import Table
from tight_fit.gpus import CONTEXT
from tight_fit.units import size

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
SUFFICES = 0.95  # of the reserved peaks that the margin suffices for
GROUPS = ("2.5 or later", "2.2 to 2.4", "2.1", "before 2.1", "not stated")
OLD = ("2.1", "before 2.1")

TEXT = (DATA / "accuracy.txt").read_text(encoding="utf8")
# What `make readme` writes.
OTHERS = re.compile("<!-- steps -->\n.*?<!-- /steps -->", re.DOTALL)
SENTENCE = (
    "The plan misses the {kind} peak of {count} published {things} by {mean:.2%} in the mean "
    "(median {median:.2%}, {worst:+.1%} at worst: {name})."
)


def group(release: str) -> str:
    """Which of `GROUPS` a published release belongs to."""
    if not release:
        return "not stated"
    if "dev" in release:
        return "before 2.1"
    numbers = tuple(int(part) for part in release.split(" ")[0].split(".")[:2])
    if numbers >= (2, 5):
        return "2.5 or later"
    if numbers >= (2, 2):
        return "2.2 to 2.4"
    return "2.1" if numbers == (2, 1) else "before 2.1"


def counted(kind: str) -> pd.DataFrame:
    """The figures of a kind that count, with the `group` of their release."""
    found = misses()
    found = found[(found["peak"] == kind) & (found["why"] == "")]
    return found.assign(group=found["release"].map(group))


def sentences() -> list[str]:
    """One sentence on allocated peaks and one on reserved peaks."""
    return [
        SENTENCE.format(kind=kind, things="steps", **Errors.of(counted(kind))._asdict())
        for kind in (ALLOCATED, RESERVED)
    ]


def summary() -> Table:
    """A row per release and kind of figure."""
    by_kind = {kind: counted(kind) for kind in (ALLOCATED, RESERVED)}
    rows = []
    for name in (*GROUPS, "all"):
        for kind, found in by_kind.items():
            some = found if name == "all" else found[found["group"] == name]
            if some.empty:
                continue
            errors = Errors.of(some)
            rows.append(
                {
                    "PyTorch": name,
                    "peak": kind,
                    "figures": errors.count,
                    "mean": f"{errors.mean:.2%}",
                    "median": f"{errors.median:.2%}",
                    "worst": f"{errors.worst:+.2%}",
                }
            )
    return Table(rows)


def files() -> dict[str, str]:
    """{name of a file of docs/data: its text}"""
    frames = {
        "accuracy.csv": data(),
        "qwen.csv": qwen_plans.table(),
        "torchtitan.csv": torchtitan_steps.table(),
    }
    return {name: frame.to_csv(index=False, lineterminator="\n") for name, frame in frames.items()}


def data() -> pd.DataFrame:
    """Every figure, those that do not count as well."""
    found = misses()
    return pd.DataFrame(
        {
            "step": found["step"],
            "GPU": found["GPU"],
            "PyTorch": found["release"].replace("", "not stated"),
            "peak": found["peak"],
            "measured_bytes": found["measured"],
            "planned_bytes": found["planned"],
            "error": found["error"].map("{:+.4f}".format),
            "counts": (found["why"] == "").map({True: "yes", False: "no"}),
            "source": found["source"],
        }
    )


def shortfalls() -> tuple[pd.Series, pd.Series]:
    """What plans are short of the reserved peak, as a part of what they allocate, at least 0, from
    the least to the most: (of PyTorch 2.2 or later, of older releases)."""
    found = counted(RESERVED)
    short = (found["measured"].astype(float) - found["planned"]).clip(lower=0) / found["tensors"]
    old = found["group"].isin(OLD)
    return short[~old].sort_values(), short[old].sort_values()


def margin() -> float:
    """The margin that the reserved peaks of PyTorch 2.2 or later ask for, in whole percent."""
    short, _ = shortfalls()
    enough = short.iloc[math.ceil(SUFFICES * len(short)) - 1]
    return max(1, math.ceil(100 * enough)) / 100


def text() -> str:
    """The page."""
    every = misses()
    short, old = shortfalls()
    enough, old_enough = (int((needs <= margin()).sum()) for needs in (short, old))
    return TEXT.format(
        steps=every[every["why"] == ""]["step"].nunique(),
        sentences="\n\n".join(sentences()),
        summary=markdown.of(summary()),
        margin=margin(),
        count=len(short),
        suffices=SUFFICES,
        enough=enough,
        less=int((short <= margin() - 0.01).sum()),
        succession=(enough + 1) / (len(short) + 2),
        most=short.iloc[-1],
        old_count=len(old),
        old_enough=old_enough,
        old_most=old.iloc[-1],
        source=QWEN,
        context=size(CONTEXT),
        qwen=qwen_plans.sentence(),
        left_out="\n".join(f"- {why}" for why in dict.fromkeys(LEFT_OUT.values())),
        torchtitan=torchtitan_steps.sentence(),
        waiting=len(to_plan()),
    )


def to_plan() -> pd.DataFrame:
    """The published peaks of docs/data/to-plan.csv, whose set-ups are still to be written."""
    return pd.read_csv(PAGE.parent / "data" / "to-plan.csv")


def write() -> None:
    """Write the data and docs/accuracy.md; the part between the marks of `make readme` stays."""
    for name, content in files().items():
        (PAGE.parent / "data" / name).write_text(content, encoding="utf8")
    PAGE.write_text(with_kept(text(), PAGE.read_text(encoding="utf8")), encoding="utf8")


def with_kept(new: str, old: str) -> str:
    """The new page with what stands between the marks of `make readme` in the old one."""
    found = OTHERS.search(old)
    return OTHERS.sub(lambda _: found[0], new) if found else new
