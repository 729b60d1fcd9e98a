"""The generated parts of README.md: the table of techniques, the planner's table, the picture. `make readme`."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from benchmarks import measured_steps, published_peaks
from helpers import gpus, plots, record
from helpers.memory.timeline import Plan
from helpers.parallel import Parallel
from helpers.plan.planner import plan
from helpers.recipe import Recipe, replace
from helpers.strategy import techniques as planned
from helpers.strategy.plan_ranks import plan_parallel
from helpers.tables import Table
from helpers.units import size
from tools.course import NOTEBOOKS, ROOT

README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "plan.png"


def techniques() -> str:
    """The table of techniques, planned anew."""
    return Table([row | {"recipe": f"`{row['recipe']}`"} for row in planned.rows()]).to_markdown()


def notebooks() -> str:
    """A row a notebook: its title and what was recorded of it on a GPU."""
    rows = []
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        source = "".join(json.loads(path.read_text(encoding="utf8"))["cells"][0]["source"])
        title = re.search(r"^# (?:\d\d\W+)?(.+)$", source, re.MULTILINE)[1].strip()
        rows.append(
            {
                "notebook": f"[{path.stem[:2]}](notebooks/{path.name})",
                "title": title,
                "recorded": recorded(path.stem),
            }
        )
    return Table(rows).to_markdown()


def recorded(notebook: str) -> str:
    """A notebook's before and after from results/, in one cell of a table."""
    found = record.read(notebook)
    if not found:
        return "none yet"
    where = next(iter(found.values())).environment["name"]
    return f"{where}: " + "; ".join(
        f"{label} {size(run.peak)} (plan {run.miss:+.1%}), {run.rows_per_second:.0f} rows/s, "
        f"{run.accuracy_label} {run.accuracy:.1%}"
        for label, run in found.items()
    )


def trust() -> str:
    """How far plans and measurements agree: GPUs' that others published, real steps that were kept, the runs in results/."""
    found = published_peaks.planned()
    allocated = [
        blocks.allocated / step.allocated - 1 for step, _, blocks in found if step.allocated
    ]
    reserved = [blocks.reserved / step.reserved - 1 for step, _, blocks in found]
    others = [step.preflight for step, *_ in found if step.preflight is not None]
    return (
        f"**Against GPUs that were not ours.** Of {len(found)} training steps that others measured on a T4 and an A10 and "
        f"published to the byte, the plan misses the allocated peak (seen of {len(allocated)}) by {_mean(allocated):.2%} in the "
        f"mean and by {_worst(allocated):+.2%} at worst, the reserved peak by {_mean(reserved):.1%} and {_worst(reserved):+.1%}; "
        f"torch-preflight, whose measurements {len(others)} of them are, publishes {_mean(others):.1%} and "
        f"{_worst(others):+.1%} for its own estimates. The A10's are the course's own models with so small a batch that the peak "
        "lies in the optimizer's step: they try weights, gradients, states and AdamW's temporaries, and hardly an activation. "
        "Sources and steps: [benchmarks/published_peaks.py](benchmarks/published_peaks.py).\n\n"
        + published_peaks.table(found).to_markdown()
        + "\n\n"
        + "".join(map(of_steps, measured_steps.read()))
        + of_records()
    )


def of_steps(kept: measured_steps.Proof) -> str:
    """The same of the real steps of one machine, every technique, in results/steps/."""
    misses, count = [step.miss for step in kept.steps], len(kept.steps)
    cpu = kept.environment["device"] == "cpu"
    models = ", ".join(dict.fromkeys(step.model.split(",")[0] for step in kept.steps))
    said = (
        f"**Against real steps of the full models, on {'a CPU' if cpu else kept.environment['name']}.** {count} steps of {models}, every "
        f"technique, each in a process of its own (`make proof`, {kept.date[:10]}, PyTorch {kept.environment['torch'].split('+')[0]}). "
    )
    if cpu:
        exact = sum(step.planned == step.allocated for step in kept.steps)
        far = [step for step in kept.steps if abs(step.miss) > 0.05]
        near = max(
            (step for step in kept.steps if step not in far), key=lambda step: abs(step.miss)
        )
        gained = [step.resident / step.allocated - 1 for step in kept.steps if step.resident]
        said += (
            f"In {exact} of them the plan is what PyTorch's allocator recorded, to the byte; it misses {_misses(far)}the others "
            f"by {abs(near.miss):.1%} at most, {size(abs(near.planned - near.allocated))} "
            f"([benchmarks/measure_step.py](benchmarks/measure_step.py) says of what). In the mean it is {_mean(misses):.2%}. Linux saw the process gain {_mean(gained):.1%} more or less than the allocator's record in the "
            f"mean, {_worst(gained):+.1%} at most. What CUDA does differently is not tried by this. "
        )
    else:
        said += f"The plan misses the allocated peak by {_mean(misses):.2%} in the mean and by {_worst(misses):+.2%} at worst. "
    return (
        said
        + "The two estimators beside it speak of a GPU.\n\n<details><summary>Every step</summary>\n\n"
        + measured_steps.table(kept).to_markdown()
        + "\n\n</details>\n\n"
    )


def _misses(far: list[measured_steps.Step]) -> str:
    """The steps that are missed by more than a twentieth, and why where that is known."""
    if not far:
        return ""
    listed = ", ".join(
        f"{step.model.split(',')[0]} with {step.technique} by {step.miss:+.1%}" for step in far
    )
    why = (
        " (bitsandbytes' CPU kernel takes copies of the vocabulary inside itself, which a GPU's does not)"
        if all(step.inside_bitsandbytes for step in far)
        else ""
    )
    return f"{listed}{why}, and "


def of_records() -> str:
    """The same of the runs in results/, or that there is none from a GPU."""
    runs = [
        run
        for path in sorted(record.RESULTS.glob("*.json"))
        if (run := record.Run.from_json(path.read_text(encoding="utf8"))).environment["device"]
        == "cuda"
    ]
    if not runs:
        return (
            "**Against our own GPUs.** `results/` holds no run from a GPU yet: DeBERTa and ViT with large batches, and every "
            "technique but mixed precision, are still to be met on a card."
        )
    misses = [run.miss for run in runs]
    worst = max(runs, key=lambda run: abs(run.miss))
    rows = [
        {
            "run": run.name,
            "model": f"{run.recipe.model}, {run.recipe.profile}",
            "card": run.environment["name"],
            "planned": size(run.planned),
            "allocated": size(run.memory["allocated"]),
            "miss": f"{run.miss:+.1%}",
            "reserved, planned": size(run.plan["reserved"]),
            "reserved": size(run.memory["reserved"]),
        }
        for run in sorted(runs, key=lambda run: -abs(run.miss))
    ]
    return (
        f"**Against our own GPUs.** Over the {len(runs)} runs in `results/`, the plan misses CUDA's allocated peak by "
        f"{_mean(misses):.1%} in the mean and by {_worst(misses):+.1%} at worst ({worst.name}, {worst.environment['name']}).\n\n"
        + Table(rows).to_markdown()
    )


def _mean(misses: list[float]) -> float:
    return sum(map(abs, misses)) / len(misses)


def _worst(misses: list[float]) -> float:
    return max(misses, key=abs)


LAYOUTS = (
    Parallel(),
    Parallel(data=4),
    Parallel(data=4, zero_stage=1),
    Parallel(data=4, zero_stage=2),
    Parallel(data=4, zero_stage=3),
    Parallel(tensor=4),
    Parallel(pipeline=4),
)


def ranks() -> str:
    """What four GPUs hold and send, planned anew: a row a layout of the same step."""
    job = Recipe(profile="full", batch_size=16, length=256, accumulation=4)
    rows = []
    for layout in LAYOUTS:
        laid = plan_parallel(job, layout)
        time = {link: laid.seconds("A100-40GB", link).total for link in ("NVLink 3", "PCIe 4 x16")}
        fields = ", ".join(
            f"{name}={value!r}"
            for name, value in vars(layout).items()
            if value != getattr(Parallel, name)
        )
        rows.append(
            {
                "layout": f"`Parallel({fields})`",
                "peak of a rank": size(laid.peak),
                "a rank sends": size(sum(laid.bytes_by_collective.values()))
                if laid.bytes_by_collective
                else "nothing",
                **{f"A100s, {link}": f"{seconds * 1e3:.0f} ms" for link, seconds in time.items()},
            }
        )
    return Table(rows).to_markdown()


def digest() -> str:
    """What the picture shows, in twelve characters."""
    whole = b"".join(step.timeline.tobytes() for step in _drawn().values())
    return hashlib.sha256(whole).hexdigest()[:12]


def _drawn() -> dict[str, Plan]:
    before = next(iter(planned.MODELS.values()))
    return {
        "accumulation=1: one batch of 16": plan(before),
        "accumulation=4: micro-batches of 4, two of four drawn": plan(
            replace(before, accumulation=4)
        ),
    }


def draw() -> None:
    """Write the picture, with the digest of what it shows in its metadata."""
    figure = plots.timeline(_drawn(), capacity=gpus.GPUS["RTX 4060 Laptop"].memory)
    figure.suptitle(
        "DeBERTa-v3-base, 16 × 256 tokens, fp32, AdamW: one optimizer step by plan. Dashed: an 8 GB laptop card"
    )
    figure.set_size_inches(11, 4)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Description": digest(), "Software": None})


def fill(text: str, but: str = "") -> str:
    """README's text with its generated blocks written anew, `but` one."""
    blocks = {"techniques": techniques, "notebooks": notebooks, "trust": trust, "ranks": ranks}
    for name, make in blocks.items():
        if name == but:
            continue
        block = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        text = re.sub(
            rf"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL
        )
    return text


def write(path: Path = README) -> None:
    from helpers import plots

    plots.style()
    path.write_text(fill(path.read_text(encoding="utf8")), encoding="utf8")
    planned.write()
    draw()
    print(f"Written: {path.name}, {planned.FILE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}")
