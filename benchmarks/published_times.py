"""Planned against published times of whole steps that no constant was fitted to, beside two simpler
estimates.

    python -m benchmarks.published_times --write

NeuSight's, Qwen's, Mistral's and MPT's steps are traced now (those of four GPUs by
`benchmarks.parallel_steps`), timm's are as `benchmarks.keep_times` kept them.

Five sources (benchmarks/data, each file names its own): NeuSight's whole passes of language models
in fp32, timm's steps of computer-vision models under autocast on an RTX 3090, Qwen-7B's LoRA steps
in bf16 on an A100, Mistral-7B's there (`benchmarks.peaks.mistral`), and MPT's in bf16 on eight
H100s (`benchmarks.foundry_steps`). The tensor-core constants were fitted to every third family of
timm's models (`benchmarks.fit_gpu_steps`); those are marked and left out of the means.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.pages import with_block
from benchmarks.time_rows import FITTED, Row, by_flops, roofline
from tight_fit.command.wrapper import run as run_command
from tight_fit.gpus.specs import SPECS
from tight_fit.kernels.step_seconds import seconds
from tight_fit.kernels.traced_ops import TracedOps

DATA = Path(__file__).parent / "data"
PAGE = Path(__file__).parents[1] / "docs" / "gpu-time.md"
ERRORS = PAGE.parent / "data" / "gpu-time.csv"  # a row a group; the page shows those of SHOWN
LENT = "NeuSight by another GPU's constants"
SHOWN = (
    "NeuSight, inference",
    "NeuSight, forward pass",
    "NeuSight, backward pass",
    LENT,
    "NeuSight, four A100s",
    "Qwen, held out",
    "Mistral-7B",
    "Mistral-7B, QLoRA",
    "MPT, eight H100s",
    "MPT, eight H100s, up to 4,096 tokens",
    "timm, held out",
    "timm, held out, transformers",
    "timm, held out, convolutions",
    "timm, held out, depthwise convolutions",
    "timm, held out, grouped convolutions",
)
SIMPLER = "timm, held out"  # the group of which the page says what simpler estimates miss
NAMES = FITTED | {
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
}
# Whose constants stand in for a GPU's own when its kernels count as never fitted.
NEAREST = {
    "T4": "V100-32GB",
    "P4": "T4",
    "P100": "V100-32GB",
    "V100-32GB": "A100-40GB",
    "A100-40GB": "V100-32GB",
    "A100-80GB-PCIe": "V100-32GB",
}


def records(name: str) -> list[dict]:
    """The rows of a file of benchmarks/data; lines that begin with # name its source and
    licence."""
    with (DATA / name).open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def neusight(modes: tuple[str, ...] = ("train", "inf"), lent: bool = False) -> list[Row]:
    """NeuSight's passes, traced now (half a minute).

    lent  plan each GPU by the constants of the nearest other one, as if never measured
    """
    from benchmarks.neusight_steps import MODELS

    found = []
    for row in records("neusight_steps.csv"):
        if row["model"] not in MODELS or row["mode"] not in modes or row["card"] not in NAMES:
            continue
        gpu = SPECS[NAMES[row["card"]]]
        traced = _pass(row["model"], row["mode"], int(row["length"]), int(row["batch"]))
        planned = seconds(traced, gpu._replace(like=NEAREST[gpu.name]) if lent else gpu)
        forward, backward = ("forward",), ("backward", "recompute")
        parts = {"forward": (forward, "forward_ms")}
        if row["mode"] == "train":
            parts["backward"] = backward, "backward_ms"
            parts["both"] = forward + backward, "total_ms"
        for part, (phases, column) in parts.items():
            flops = sum(traced.flops[phase] for phase in phases)
            found.append(
                Row(
                    LENT if lent else "NeuSight",
                    gpu.name,
                    f"{row['model']} {row['batch']} × {row['length']}",
                    "training" if row["mode"] == "train" else "inference",
                    part,
                    float(row[column]) / 1e3,
                    sum(planned.phases[phase] for phase in phases),
                    by_flops(flops, gpu.fp32),
                    roofline(traced, gpu, phases),
                    True,
                )
            )
    return found


@cache
def _pass(model: str, mode: str, length: int, batch: int) -> TracedOps:
    from benchmarks.neusight_steps import trace

    return trace(model, mode, length, batch)


def four_gpus() -> list[Row]:
    """NeuSight's steps on four A100s by data, tensor and pipeline parallelism, traced now (half a
    minute). No constant was fitted to them."""
    from benchmarks.parallel_steps import GPU, LAYOUTS, planned, ranks

    measured = {
        row["layout"]: float(row["total_ms"]) / 1e3
        for row in records("neusight_steps.csv")
        if row["card"] == "NVIDIA A100-SXM4-40GB"
    }
    found, gpu = [], SPECS[GPU]
    for layout, parallel in LAYOUTS.items():
        traces = ranks(layout)  # of a pipeline with one micro-batch, which go one after another
        found.append(
            Row(
                "NeuSight, four A100s",
                gpu.name,
                f"gpt2_large, {parallel}",
                "training",
                "both",
                measured[layout],
                planned(layout).total,
                by_flops(sum(sum(traced.flops.values()) for traced in traces), gpu.fp32),
                sum(roofline(traced, gpu, traced.flops) for traced in traces),
                True,
            )
        )
    return found


def qwen() -> list[Row]:
    """Qwen-7B's LoRA steps, traced now (half a minute)."""
    from benchmarks.qwen_steps import FITTED, trace

    gpu, found = SPECS["A100-80GB"], []
    for row in records("qwen_steps.csv"):
        length = int(row["length"])
        traced = trace(length)
        found.append(
            Row(
                "Qwen",
                gpu.name,
                f"Qwen-7B LoRA 8 × {length}",
                "language model",
                "step",
                float(row["seconds"]),
                seconds(traced, gpu).total,
                by_flops(sum(traced.flops.values()), gpu.bf16),
                roofline(traced, gpu, traced.flops),
                length != FITTED,
            )
        )
    return found


def mistral() -> list[Row]:
    """Mistral-7B's steps with all weights, LoRA and QLoRA in NF4, traced now (half a minute)."""
    from benchmarks.peaks.mistral import LENGTH, ROWS, step_of
    from tight_fit.plans.model import plan_model_step

    gpu, found = SPECS["A100-80GB"], []
    for way, examples, _, tokens_per_second in ROWS:
        traced = plan_model_step(step_of(way, examples)).operations
        assert traced is not None, "the step is planned for a GPU"
        found.append(
            Row(
                "Mistral-7B",
                gpu.name,
                f"Mistral-7B, {way}, {examples} × {LENGTH}",
                way.split()[0],
                "step",
                examples * LENGTH / tokens_per_second,
                seconds(traced, gpu).total,
                by_flops(sum(traced.flops.values()), gpu.bf16),
                roofline(traced, gpu, traced.flops),
                True,
            )
        )
    return found


def mpt() -> list[Row]:
    """MPT's steps on eight H100s, planned now (minutes)."""
    from benchmarks import foundry_steps

    gpu, found = SPECS[foundry_steps.GPU], []
    for row in records("foundry_h100.csv"):
        plan, length = foundry_steps.plan(row), int(row["length"])
        tokens = int(row["micro"]) * int(row["accumulation"]) * length
        traced = plan.operations
        assert traced is not None, "the step is planned for a GPU"
        found.append(
            Row(
                "MPT, eight H100s",
                gpu.name,
                f"MPT-{row['model']} {row['micro']} × {length}",
                "up to 4,096 tokens" if length <= 4096 else "longer texts",
                "step",
                tokens / int(row["tokens"]),
                foundry_steps.planned(plan),
                by_flops(sum(traced.flops.values()), gpu.bf16),
                roofline(traced, gpu, traced.flops),
                True,
            )
        )
    return found


def timm() -> list[Row]:
    """timm's steps, planned when benchmarks/data/timm_rtx3090.csv was written."""
    return [
        Row(
            "timm",
            "RTX 3090",
            f"{row['model']} {row['batch']} × {row['length']} {row['layout']}",
            row["class"],
            "step",
            *(
                float(row[name]) / 1e3
                for name in ("measured_ms", "planned_ms", "by_flops_ms", "roofline_ms")
            ),
            row["fitted"] == "no",
        )
        for row in records("timm_rtx3090.csv")
    ]


def summary(rows: Iterable[Row]) -> dict[str, float]:
    """Mean and median absolute, mean and worst error of plans, and the mean absolute errors of the
    two simpler estimates, as parts of what was measured."""
    rows = list(rows)
    planned, flops, roof = (
        np.array([getattr(row, name) / row.measured - 1 for row in rows])
        for name in ("planned", "by_flops", "roofline")
    )
    return {
        "times": len(rows),
        "mean error": float(np.abs(planned).mean()),
        "median error": float(np.median(np.abs(planned))),
        "signed mean": float(planned.mean()),
        "worst": float(planned[np.abs(planned).argmax()]),
        "FLOPs / 0.4 peak": float(np.abs(flops).mean()),
        "roofline": float(np.abs(roof).mean()),
    }


def lines_of(groups: dict[str, list[Row]]) -> list[str]:
    """The lines of docs/data/gpu-time.csv, the head first: errors as fractions."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    for place, (name, rows) in enumerate(groups.items()):
        found = summary(rows)
        if not place:
            out.writerow(["group", *found])
        times, *errors = found.values()
        out.writerow([name, times, *(f"{error:.5f}" for error in errors)])
    return text.getvalue().splitlines()


def table(lines: Iterable[str]) -> str:
    """The page's table and its sentence in Markdown: the groups of `SHOWN` of the data file."""
    found = {row["group"]: row for row in csv.DictReader(lines)}
    rows = ["| | times | mean | median | worst |", "|---|---|---|---|---|"]
    for name in SHOWN:
        mean, median, worst = (
            float(found[name][key]) for key in ("mean error", "median error", "worst")
        )
        cells = f"{mean:.1%} | {median:.1%} | {worst:+.1%}"
        rows.append(f"| {name} | {found[name]['times']} | {cells} |")
    flops, roof = (float(found[SIMPLER][key]) for key in ("FLOPs / 0.4 peak", "roofline"))
    rows += [
        "",
        f"Simpler estimates miss the group *{SIMPLER}* by more in the mean: floating-point "
        f"operations over 40 % of the peak by {flops:.0%}, every kernel at its peak by {roof:.0%}.",
        "",
        f"*{LENT}* leaves one GPU out at a time: planned as if its own kernels were not "
        f"measured, it is missed by {_one_out(found)}.",
    ]
    return "\n".join(rows)


def _one_out(found: dict[str, dict[str, str]]) -> str:
    """The mean error of each GPU by another's constants, the least first."""
    means = {
        name.removeprefix(f"{LENT}, "): float(row["mean error"])
        for name, row in found.items()
        if name.startswith(f"{LENT}, ")
    }
    parts = [f"{means[name]:.0%} ({name})" for name in sorted(means, key=means.__getitem__)]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def missed(group: str = SIMPLER) -> tuple[int, float, float, float]:
    """(times, mean and median of the errors' sizes, worst error) of a group of the data file."""
    with ERRORS.open(encoding="utf8") as lines:
        found = next(row for row in csv.DictReader(lines) if row["group"] == group)
    mean, median, worst = (float(found[key]) for key in ("mean error", "median error", "worst"))
    return int(found["times"]), mean, median, worst


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """The groups of the published table, by source, GPU and class of model."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for name in _groups_of(row):
            found.setdefault(name, []).append(row)
    return dict(sorted(found.items()))


def _groups_of(row: Row) -> list[str]:
    seen = "held out" if row.held_out else "fitted"
    if row.source == "timm":
        where = "channels last" if row.model.endswith("nhwc") else "channels first"
        names = ["timm, all", f"timm, {seen}"]
        if row.held_out:
            names += [f"timm, {seen}, {row.kind}", f"timm, {seen}, {row.kind}, {where}"]
        return names
    if row.source == "Qwen":
        return [f"Qwen, {seen}"]
    if row.source in ("Mistral-7B", "MPT, eight H100s"):
        return [row.source, f"{row.source}, {row.kind}"]
    if "four" in row.source:
        return [row.source, f"{row.source}, {row.model}"]
    parts = {"forward": "forward pass", "backward": "backward pass", "both": "both passes"}
    part = "inference" if row.kind == "inference" else parts[row.part]
    if row.source != "NeuSight":  # forward passes in training hold allocations
        return [row.source, f"{row.source}, {row.gpu}"] if part in CLEAN else []
    return [f"NeuSight, {part}", *([f"NeuSight, {part}, {row.gpu}"] if row.part != "both" else [])]


CLEAN = ("inference", "backward pass")  # labels that hold no allocation of memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", action="store_true", help="print every step, too")
    parser.add_argument("--write", action="store_true", help="write the data and the page's table")
    given = parser.parse_args()
    rows = neusight() + neusight(lent=True) + four_gpus() + timm() + qwen() + mistral()
    rows += mpt()
    if given.each:
        for row in rows:
            print(
                f"{row.source:21s}{row.gpu:16s}{row.model:45s}{row.part:9s}"
                f"{row.measured * 1e3:9.1f} ms "
                f"{row.planned / row.measured - 1:+.1%}{'' if row.held_out else ' fitted'}"
            )
    lines = lines_of(groups(rows))
    print("\n".join(lines))
    if given.write:
        ERRORS.write_text("\n".join(lines) + "\n", "utf8")
        PAGE.write_text(with_block(PAGE.read_text("utf8"), "errors", table(lines)), "utf8")


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m benchmarks.published_times"))
