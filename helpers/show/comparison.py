"""A fine-tune before and after one change: plan, run here and, where there is one, the record."""

from __future__ import annotations

from helpers.recipe import difference
from helpers.record import Run, read
from helpers.tables import Table
from tight_fit.checks import each_of_type
from tight_fit.units import duration, size


def before_and_after(before: Run, after: Run, more: dict[str, Run] | None = None) -> Table:
    """The two runs of a lesson, and what a GPU recorded of the same notebook, as one table.

    more  further runs by label, for a table of more than two
    The caption says in a sentence what the change did to memory, accuracy and, on a GPU, time.
    Times are shown only of a GPU: a CPU's depend on what else it does. Rows of a record appear only
    where `results/` has one.

    Raises ValueError where the recipes of before and after differ in more, or less, than one
    field, TypeError for what is no run.
    """
    each_of_type("runs", {"before": before, "after": after, **(more or {})}, Run)
    changed = difference(before.recipe, after.recipe)
    if len(changed) != 1:
        raise ValueError(
            "Before and after must differ in one field of the recipe, these differ in "
            f"{len(changed)}: {', '.join(changed) or 'none'}."
        )
    ((name, (old, new)),) = changed.items()
    rows = [_row(f"before: {name}={old}", before), _row(f"after: {name}={new}", after)]
    rows += [_row(label, run) for label, run in (more or {}).items()]
    notebook = before.name.split("/", 1)[0]
    for label, run in read(notebook).items():
        rows.append(_row(f"recorded on {run.environment['name']}: {label}", run))
    if not any(row["time per step"] for row in rows):
        for row in rows:
            del row["time per step"]
    return Table(rows, _sentence(before, after))


def _row(label: str, run: Run) -> dict[str, str]:
    random = "" if run.recipe.weights == "pretrained" else " (random weights)"
    on_a_gpu = run.environment["device"] == "cuda"
    return {
        "run": label,
        "memory, planned": size(run.planned),
        "memory, measured": size(run.peak),
        "time per step": duration(run.step_seconds) if on_a_gpu else "",
        "accuracy": f"{run.accuracy:.1%}{random}",
    }


def _sentence(before: Run, after: Run) -> str:
    """What changed from the first run to the second, in words and numbers."""
    saved = 1 - after.peak / before.peak
    percent = f"{abs(saved):.0%}"
    memory = f"{percent} {'less' if saved > 0 else 'more'} memory than before"
    if percent == "0%":
        memory = "as much memory as before"
    if before.environment["device"] == "cuda":
        machine = f"the {before.environment['name']}"
        ratio = after.step_seconds / before.step_seconds
        time = f" and {ratio:.2f} times the time per step"
    else:
        machine, time = "this CPU", ""
    points = 100 * (after.accuracy - before.accuracy)
    test = f"{after.test_rows} test examples"
    return (
        f"On {machine}: after takes {memory}{time}. "
        f"Its accuracy on {test} differs by {points:+.1f} points, from one run each."
    )
