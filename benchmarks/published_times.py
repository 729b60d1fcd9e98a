"""Planned against published times of whole steps that no constant was fitted to, beside two simpler
estimates.

    python -m benchmarks.published_times --write

NeuSight's, Qwen's, Mistral's and MPT's steps are traced now (those of four GPUs by
`benchmarks.parallel_steps`), timm's are as `benchmarks.keep_times` kept them.

Five sources (benchmarks/data, each file names its own): NeuSight's whole passes of language models
in fp32, timm's steps of computer-vision models under autocast on an RTX 3090, Qwen-7B's LoRA steps
in bf16 on an A100 (`benchmarks.peaks.qwen`), Mistral-7B's there (data/peaks.csv), and
MPT's in bf16 on eight H100s (`benchmarks.foundry_steps`). The tensor-core constants were fitted to
every third family of timm's models (`benchmarks.fit_gpu_steps`); those are marked and left out of
the means.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from benchmarks.pages import records, with_block
from tight_fit.command.wrapper import run as run_command
from tight_fit.gpus.specs import SPECS, GpuSpecs
from tight_fit.kernels.kernel_time import SIZE
from tight_fit.kernels.step_seconds import seconds
from tight_fit.kernels.traced_ops import TracedOps

NAME = "python -m benchmarks.published_times"
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
_CARDS = records("neusight_cards.csv")
NAMES = dict(zip(_CARDS["card"], _CARDS["gpu"]))
NEAREST = dict(_CARDS[["gpu", "nearest"]].dropna().to_numpy().tolist())
# The GPUs whose kernels NeuSight published, as it names them.
FITTED = {card: NAMES[card] for card in _CARDS["card"][_CARDS["kernels"] == "yes"]}
PARTS = {"forward": ("forward",), "backward": ("backward", "recompute")}
PARTS["both"] = PARTS["forward"] + PARTS["backward"]


class Row(NamedTuple):
    """One published time with what is planned for it; times in seconds. `part` is "backward",
    "forward", "both" or "step"."""

    source: str
    gpu: str
    model: str
    kind: str
    part: str
    measured: float
    planned: float
    by_flops: float
    roofline: float
    held_out: bool = True


def by_flops(flops: int, peak: float) -> float:
    """Seconds by the usual rule: 40 % of the peak."""
    return flops / (0.4 * peak)


def roofline(traced: TracedOps, gpu: GpuSpecs, phases: Iterable[str]) -> float:
    """Seconds if every kernel ran at the peak of its arithmetic or of the memory, whichever ends
    later."""
    return sum(
        times
        * max(
            op.flops / gpu.peak(op.arithmetic if op.arithmetic in SIZE and op.flops else "fp32"),
            (op.read + op.written) / gpu.bandwidth,
        )
        for (op, phase), times in traced.counted().items()
        if phase in phases
    )


def _in_bf16(
    gpu: str,
    source: str,
    model: str,
    kind: str,
    measured: float,
    traced: TracedOps | None,
    planned: float | None = None,
    held_out: bool = True,
) -> Row:
    """A step in bf16; planned: None plans what was traced for one GPU."""
    assert traced is not None, "the step is planned for a GPU"
    specs = SPECS[gpu]
    planned = seconds(traced, specs).total if planned is None else planned
    simple = by_flops(sum(traced.flops.values()), specs.bf16), roofline(traced, specs, traced.flops)
    return Row(source, gpu, model, kind, "step", measured, planned, *simple, held_out)


def neusight(modes: tuple[str, ...] = ("train", "inf"), lent: bool = False) -> list[Row]:
    """NeuSight's passes, traced now (half a minute).

    lent  plan each GPU by the constants of the nearest other one, as if never measured
    """
    from benchmarks.neusight_steps import MODELS

    found = []
    for row in records("neusight_steps.csv").to_dict("records"):
        if row["model"] not in MODELS or row["mode"] not in modes or row["card"] not in NAMES:
            continue
        gpu = SPECS[NAMES[row["card"]]]
        traced = _pass(row["model"], row["mode"], row["length"], row["batch"])
        planned = seconds(traced, gpu._replace(like=NEAREST[gpu.name]) if lent else gpu)
        training = row["mode"] == "train"
        for part, phases in PARTS.items() if training else [("forward", PARTS["forward"])]:
            found.append(
                Row(
                    LENT if lent else "NeuSight",
                    gpu.name,
                    f"{row['model']} {row['batch']} × {row['length']}",
                    "training" if training else "inference",
                    part,
                    row["total_ms" if part == "both" else f"{part}_ms"] / 1e3,
                    sum(planned.phases[phase] for phase in phases),
                    by_flops(sum(traced.flops[phase] for phase in phases), gpu.fp32),
                    roofline(traced, gpu, phases),
                )
            )
    return found


@cache
def _pass(model: str, mode: str, length: int, batch: int) -> TracedOps:
    from benchmarks.neusight_steps import trace

    return trace(model, mode, length, batch)[0]


def four_gpus() -> list[Row]:
    """NeuSight's steps on four A100s by data, tensor and pipeline parallelism, traced now (half a
    minute). No constant was fitted to them."""
    from benchmarks.parallel_steps import GPU, LAYOUTS, planned, ranks

    table, gpu = records("neusight_steps.csv"), SPECS[GPU]
    measured = table[table["card"] == "NVIDIA A100-SXM4-40GB"].set_index("layout")["total_ms"] / 1e3
    found = []
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
            )
        )
    return found


def qwen() -> list[Row]:
    """Qwen-7B's LoRA steps, traced now (half a minute)."""
    from benchmarks.peaks.qwen import FITTED, LORA, PUBLISHED
    from benchmarks.peaks.qwen_plans import planned

    return [
        _in_bf16(
            "A100-80GB",
            "Qwen",
            f"Qwen-7B LoRA 8 × {row.length}",
            "language model",
            row.seconds,
            planned(row).operations,
            held_out=row.length != FITTED,
        )
        for row in PUBLISHED
        if row.way == LORA
    ]


def mistral() -> list[Row]:
    """Mistral-7B's steps with all weights, LoRA and QLoRA in NF4, traced now (half a minute)."""
    from benchmarks.peaks.points import POINTS
    from tight_fit.plans.model import plan_model_step

    return [
        _in_bf16(
            point.gpu.name,
            "Mistral-7B",
            point.name,
            point.name.split(", ")[1].split()[0],
            point.setup.batch_size * point.setup.length / point.tokens_per_second,
            plan_model_step(point.setup).operations,
        )
        for point in POINTS
        if point.tokens_per_second
    ]


def mpt() -> list[Row]:
    """MPT's steps on eight H100s, planned now (minutes)."""
    from benchmarks import foundry_steps

    found = []
    for row in records("foundry_h100.csv").to_dict("records"):
        plan, length = foundry_steps.plan(row), row["length"]
        found.append(
            _in_bf16(
                foundry_steps.GPU,
                "MPT, eight H100s",
                f"MPT-{row['model']} {row['micro']} × {length}",
                "up to 4,096 tokens" if length <= 4096 else "longer texts",
                row["micro"] * row["accumulation"] * length / row["tokens"],
                plan.operations,
                foundry_steps.planned(plan),
            )
        )
    return found


def timm() -> list[Row]:
    """timm's steps, planned when benchmarks/data/timm_rtx3090.csv was written."""
    times = ["measured_ms", "planned_ms", "by_flops_ms", "roofline_ms"]
    return [
        Row(
            "timm",
            "RTX 3090",
            f"{row['model']} {row['batch']} × {row['length']} {row['layout']}",
            row["class"],
            "step",
            *(row[name] / 1e3 for name in times),
            row["fitted"] == "no",
        )
        for row in records("timm_rtx3090.csv").to_dict("records")
    ]


def summary(rows: Iterable[Row]) -> pd.Series:
    """Mean and median absolute, mean and worst error of plans, and the mean absolute errors of the
    two simpler estimates, as parts of what was measured."""
    table = pd.DataFrame(rows)
    planned, flops, roof = (
        table[name] / table["measured"] - 1 for name in ("planned", "by_flops", "roofline")
    )
    return pd.Series(
        {
            "mean error": planned.abs().mean(),
            "median error": planned.abs().median(),
            "signed mean": planned.mean(),
            "worst": planned[planned.abs().idxmax()],
            "FLOPs / 0.4 peak": flops.abs().mean(),
            "roofline": roof.abs().mean(),
        }
    )


def errors(rows: Iterable[Row]) -> pd.DataFrame:
    """What docs/data/gpu-time.csv holds: a row a group, its number of `times` and `summary`."""
    members: dict[str, list[Row]] = {}
    for row in rows:
        for name in _groups_of(row):
            members.setdefault(name, []).append(row)
    table = pd.DataFrame({name: summary(members[name]) for name in sorted(members)}).T
    table.insert(0, "times", [len(members[name]) for name in table.index])
    return table.rename_axis("group")


def lines_of(table: pd.DataFrame) -> list[str]:
    """The lines of docs/data/gpu-time.csv, the head first: errors as fractions."""
    return table.to_csv(float_format="%.5f", lineterminator="\n").splitlines()


def read() -> pd.DataFrame:
    """The kept errors, by group."""
    return pd.read_csv(ERRORS, index_col="group")


def table(found: pd.DataFrame) -> str:
    """The page's table and its sentence in Markdown: the groups of `SHOWN`."""
    rows = ["| | times | mean | median | worst |", "|---|---|---|---|---|"]
    for name, row in found.loc[list(SHOWN)].iterrows():
        cells = f"{row['mean error']:.1%} | {row['median error']:.1%} | {row['worst']:+.1%}"
        rows.append(f"| {name} | {row['times']:.0f} | {cells} |")
    flops, roof = found.loc[SIMPLER, ["FLOPs / 0.4 peak", "roofline"]]
    of_gpus = found["mean error"][found.index.str.startswith(f"{LENT}, ")].sort_values()
    parts = [f"{mean:.0%} ({name.removeprefix(f'{LENT}, ')})" for name, mean in of_gpus.items()]
    rows += [
        "",
        f"Simpler estimates miss the group *{SIMPLER}* by more in the mean: floating-point "
        f"operations over 40 % of the peak by {flops:.0%}, every kernel at its peak by {roof:.0%}.",
        "",
        f"*{LENT}* leaves one GPU out at a time: planned as if its own kernels were not "
        f"measured, it is missed by {', '.join(parts[:-1])} and {parts[-1]}.",
    ]
    return "\n".join(rows)


def missed(group: str = SIMPLER) -> tuple[int, float, float, float]:
    """(times, mean and median of the errors' sizes, worst error) of a group of the data file."""
    times, *found = read().loc[group, ["times", "mean error", "median error", "worst"]]
    return (int(times), *found)


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
    """Plan every step, print the errors, and keep them where asked to; many minutes."""
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__.splitlines()[0])
    parser.add_argument("--each", action="store_true", help="print every step, too")
    parser.add_argument("--write", action="store_true", help="write the data and the page's table")
    given = parser.parse_args()
    rows = neusight() + neusight(lent=True) + four_gpus() + timm() + qwen() + mistral() + mpt()
    if given.each:
        each = pd.DataFrame(rows)
        print(each.assign(error=each["planned"] / each["measured"] - 1).to_string())
    found = errors(rows)
    print("\n".join(lines_of(found)))
    if given.write:
        ERRORS.write_text("\n".join(lines_of(found)) + "\n", "utf8")
        PAGE.write_text(with_block(PAGE.read_text("utf8"), "errors", table(found)), "utf8")


if __name__ == "__main__":
    raise SystemExit(run_command(main, NAME))
