"""docs/accuracy.md and README's sentences on accuracy, from the kept plans of published peaks."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import markdown, torchtitan_steps
from benchmarks.peaks import qwen_plans
from benchmarks.peaks.kept import ALLOCATED, RESERVED, Miss, misses, read
from benchmarks.peaks.points import LEFT_OUT
from helpers.tables import Table

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
SUFFICES = 0.95  # of the reserved peaks that the margin suffices for
GROUPS = ("2.5 or later", "2.2 to 2.4", "2.1", "before 2.1", "not stated")

TEXT = """# How far to trust a plan of memory

Written by `python -m benchmarks.peaks`, which plans {steps} training steps that others measured on
their GPUs and published. [benchmarks/peaks](../benchmarks/peaks/__init__.py) says how points are
chosen: the set-up is written before its plan is seen, and no point is dropped because of its error.

{sentences}

What a plan equals by construction, on the mini models, is in [architecture.md](architecture.md).
What times miss is in [gpu-time.md](gpu-time.md).

## By release of PyTorch

*Allocated* is `torch.cuda.max_memory_allocated`, *reserved* is `max_memory_reserved`. Errors are
planned / measured - 1; mean and median are of their sizes.

{summary}

A nightly of 2.1 from before July 2023 counts as before 2.1, as its Adam is that of 2.0.

## What was measured here

By `make proof` and `make record`; `make readme` writes this part.

<!-- steps -->
<!-- /steps -->

## The margin

`Plan.fits` adds a margin to what the allocator needs, as a plan that is too small ends in an
out-of-memory error. It is the smallest whole percentage of the tensors' peak that would have been
enough for {suffices:.0%} of the reserved peaks measured with PyTorch 2.2 or later, or with a
release that is not stated: {margin:.0%}. That was enough for {enough} of {count} of them, so the
next step fits with a probability of {succession:.0%} if it is one like these (rule of succession);
one percent less would have been enough for {less}. The largest shortfall of them is {most:.1%}; of
{old_count} reserved peaks of older releases, {old_most:.1%} ({old_enough} would have had enough).

Every figure is a row of [data/accuracy.csv](data/accuracy.csv), with its source. The set-ups of
{waiting} more ([data/to-plan.csv](data/to-plan.csv)) are not written yet.

{language}
{layouts}
## Left out

After their plans were seen, the set-ups of these points proved not to be what was measured, or
that is not known. They count nowhere above; those whose plans are kept are marked in the data.

{left_out}
"""
# What `make readme` writes.
OTHERS = re.compile("<!-- steps -->\n.*?<!-- /steps -->", re.DOTALL)
SENTENCE = (
    "The plan misses the {kind} peak of {count} published {things} by {mean:.2%} in the mean "
    "(median {median:.2%}, {worst:+.1%} at worst: {name})."
)


@dataclass(frozen=True)
class Errors:
    """Mean and median of the sizes of errors, and the largest with its sign and its point."""

    mean: float
    median: float
    worst: float
    name: str
    count: int

    @classmethod
    def of(cls, found: Sequence[Miss]) -> Errors:
        """Raises ValueError for none."""
        sizes = [abs(miss.error) for miss in found]
        worst = max(found, key=lambda miss: abs(miss.error))
        return cls(
            statistics.mean(sizes),
            statistics.median(sizes),
            worst.error,
            worst.point.name,
            len(sizes),
        )


def group(release: str) -> str:
    """Which of `GROUPS` a published release belongs to."""
    if not release:
        return "not stated"
    if "dev" in release:
        return "before 2.1"
    major, minor = (int(part) for part in release.split(" ")[0].split(".")[:2])
    if (major, minor) >= (2, 5):
        return "2.5 or later"
    if (major, minor) >= (2, 2):
        return "2.2 to 2.4"
    return "2.1" if (major, minor) == (2, 1) else "before 2.1"


def counted(kind: str, found: Iterable[Miss] | None = None) -> list[Miss]:
    """The figures of a kind that count."""
    return [m for m in (misses() if found is None else found) if m.kind == kind and not m.why]


def sentences() -> list[str]:
    """One sentence on allocated peaks and one on reserved peaks."""
    return [
        SENTENCE.format(kind=kind, things="steps", **vars(Errors.of(counted(kind))))
        for kind in (ALLOCATED, RESERVED)
    ]


def summary() -> Table:
    """A row per release and kind of figure."""
    rows = []
    for name in (*GROUPS, "all"):
        for kind in (ALLOCATED, RESERVED):
            found = [m for m in counted(kind) if name in ("all", group(m.point.release))]
            if not found:
                continue
            errors = Errors.of(found)
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
    return {
        "accuracy.csv": data(),
        "qwen.csv": qwen_plans.table().frame.to_csv(index=False, lineterminator="\n"),
        "torchtitan.csv": torchtitan_steps.table().frame.to_csv(index=False, lineterminator="\n"),
    }


def data() -> str:
    """The text of docs/data/accuracy.csv: a row per figure, what is left out included."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow("step GPU PyTorch peak measured_bytes planned_bytes error counts source".split())
    for miss in misses():
        point, counts = miss.point, "no" if miss.why else "yes"
        sizes = (miss.measured, miss.planned, f"{miss.error:+.4f}")
        release = point.release or "not stated"
        out.writerow((point.name, point.gpu.name, release, miss.kind, *sizes, counts, point.source))
    return text.getvalue()


def is_old(miss: Miss) -> bool:
    """Whether a figure is of a release before 2.2."""
    return group(miss.point.release) in ("2.1", "before 2.1")


def shortfalls(found: Iterable[Miss]) -> list[float]:
    """What each plan is short of the reserved peak, as a part of what it allocates; at least 0."""
    kept = read()
    return sorted(
        max(0.0, (miss.measured - miss.planned) / kept[miss.point.name][ALLOCATED])
        for miss in found
    )


def margin() -> float:
    """The margin that the reserved peaks of PyTorch 2.2 or later ask for, in whole percent."""
    short = shortfalls(miss for miss in counted(RESERVED) if not is_old(miss))
    enough = short[math.ceil(SUFFICES * len(short)) - 1]
    return max(1, math.ceil(100 * enough)) / 100


def text() -> str:
    """The page."""
    every = misses()
    reserved = counted(RESERVED, every)
    short = shortfalls(miss for miss in reserved if not is_old(miss))
    old = shortfalls(miss for miss in reserved if is_old(miss))
    reasons = "\n".join(f"- {why}" for why in dict.fromkeys(LEFT_OUT.values()))
    enough, old_enough = (sum(need <= margin() for need in needs) for needs in (short, old))
    return TEXT.format(
        steps=len({miss.point.name for miss in every if not miss.why}),
        sentences="\n\n".join(sentences()),
        summary=markdown.of(summary()),
        margin=margin(),
        count=len(short),
        suffices=SUFFICES,
        enough=enough,
        less=sum(need <= margin() - 0.01 for need in short),
        succession=(enough + 1) / (len(short) + 2),
        most=short[-1],
        old_count=len(old),
        old_enough=old_enough,
        old_most=old[-1],
        language=qwen_plans.section(),
        left_out=reasons,
        layouts=torchtitan_steps.section(),
        waiting=len(to_plan()),
    )


def to_plan() -> list[dict[str, str]]:
    """The published peaks of docs/data/to-plan.csv, whose set-ups are still to be written."""
    with (PAGE.parent / "data" / "to-plan.csv").open(encoding="utf8") as lines:
        return list(csv.DictReader(lines))


def write() -> None:
    """Write the data and docs/accuracy.md; the part between the marks of `make readme` stays."""
    for name, content in files().items():
        (PAGE.parent / "data" / name).write_text(content, encoding="utf8")
    PAGE.write_text(with_kept(text(), PAGE.read_text(encoding="utf8")), encoding="utf8")


def with_kept(new: str, old: str) -> str:
    """The new page with what stands between the marks of `make readme` in the old one."""
    found = OTHERS.search(old)
    return OTHERS.sub(lambda _: found[0], new) if found else new
