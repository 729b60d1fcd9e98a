"""Planned against published times of whole steps that no constant was fitted to, beside two simpler estimates.

    python -m benchmarks.published_times                              NeuSight's steps traced now, timm's as kept
    python -m benchmarks.published_times --timm FOLDER --write        timm's planned anew from `benchmarks.timm_steps`' traces

Two sources (benchmarks/data, each file names its own): NeuSight's whole passes of language models in fp32, and timm's steps of
computer-vision models under autocast on an RTX 3090. The tensor-core constants were fitted to every third family of timm's
models (`benchmarks.fit_gpu_steps`); those are marked and left out of the means.
"""
from __future__ import annotations

import argparse
import csv
import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from helpers.timing import kernel_time
from helpers.timing.kernel_time import SIZE, constants
from helpers.timing.specs import GPUS, Gpu
from helpers.timing.step_seconds import seconds
from helpers.timing.trace_ops import TracedOps

DATA = Path(__file__).parent / "data"
CARDS = {"Tesla T4": "T4", "Tesla P4": "P4", "Tesla P100-PCIE-16GB": "P100", "Tesla V100-PCIE-32GB": "V100-32GB",
         "NVIDIA A100-PCIE-40GB": "A100-40GB", "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe", "NVIDIA GeForce RTX 3090": "RTX 3090"}
TRANSFORMERS = {"beit", "cait", "coat", "convit", "crossvit", "deit", "levit", "nest", "pit", "swin", "swinv", "tnt", "twins",
                "visformer", "vit", "volo", "xcit"}
MULTILAYER = {"mixer", "gmixer", "gmlp", "resmlp", "poolformer", "convmixer", "sequencer"}


class Row(NamedTuple):
    """One published time with what is planned for it; times in seconds. `part` is "backward", "forward", "both" or "step"."""
    source: str
    gpu: str
    model: str
    kind: str
    part: str
    measured: float
    planned: float
    by_flops: float
    roofline: float
    held_out: bool


def by_flops(flops: int, peak: float) -> float:
    """Seconds by the usual rule: 40 % of the peak."""
    return flops / (0.4 * peak)


def roofline(traced: TracedOps, gpu: Gpu, phases: Iterable[str]) -> float:
    """Seconds if every kernel ran at the peak of its arithmetic or of the memory, whichever ends later."""
    return sum(times * max(op.flops / gpu.peak(op.arithmetic if op.arithmetic in SIZE and op.flops else "fp32"),
                           (op.read + op.written) / gpu.bandwidth)
               for (op, phase), times in traced.counted().items() if phase in phases)


def records(name: str) -> list[dict]:
    """The rows of a file of benchmarks/data; lines that begin with # name its source and licence."""
    with (DATA / name).open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def neusight(modes: tuple[str, ...] = ("train", "inf")) -> list[Row]:
    """NeuSight's passes, traced now (half a minute)."""
    from benchmarks.neusight_steps import MODELS, trace
    trace = lru_cache(maxsize=None)(trace)
    found = []
    for row in records("neusight_steps.csv"):
        if row["model"] not in MODELS or row["mode"] not in modes or row["card"] not in CARDS:
            continue
        gpu, traced = GPUS[CARDS[row["card"]]], trace(row["model"], row["mode"], int(row["length"]), int(row["batch"]))
        planned = seconds(traced, gpu)
        forward, backward = ("forward",), ("backward", "recompute")
        parts = [("forward", forward, "forward_ms")]
        if row["mode"] == "train":
            parts += [("backward", backward, "backward_ms"), ("both", forward + backward, "total_ms")]
        for part, phases, column in parts:
            found.append(Row("NeuSight", gpu.name, f"{row['model']} {row['batch']} × {row['length']}",
                             "training" if row["mode"] == "train" else "inference", part, float(row[column]) / 1e3,
                             sum(planned.phases[phase] for phase in phases),
                             by_flops(sum(traced.flops[phase] for phase in phases), gpu.fp32),
                             roofline(traced, gpu, phases), True))
    return found


def timm() -> list[Row]:
    """timm's steps, planned when benchmarks/data/timm_rtx3090.csv was written."""
    return [Row("timm", "RTX 3090", f"{row['model']} {row['batch']} × {row['length']} {row['layout']}", row["class"], "step",
                *(float(row[name]) / 1e3 for name in ("measured_ms", "planned_ms", "by_flops_ms", "roofline_ms")),
                row["fitted"] == "no") for row in records("timm_rtx3090.csv")]


def kind_of(family: str, traced: TracedOps) -> str:
    """What decides how a vision model runs."""
    if family in TRANSFORMERS:
        return "transformer"
    if family in MULTILAYER:
        return "multilayer perceptron"
    kinds = {(op.kind, op.kind == "convolution" and op.shape[0] > 1) for ops in traced.ops for op in ops}
    return "grouped convolutions" if ("convolution", True) in kinds else \
        "depthwise convolutions" if ("depthwise", False) in kinds else "convolutions"


def constants_mark() -> str:
    """A mark of the constants, to tell whether kept plans were made by them."""
    return hashlib.sha256((Path(kernel_time.__file__).parent / "constants.json").read_bytes()).hexdigest()[:12]


def write_timm(steps: Path, folder: Path) -> None:
    """Plan timm's steps anew and keep them in benchmarks/data/timm_rtx3090.csv."""
    import pickle

    from benchmarks.fit_gpu_steps import family
    from benchmarks.timm_steps import channels_last
    gpu, fitted = GPUS["RTX 3090"], set(constants()["fitted families"])
    with (DATA / "timm_rtx3090.csv").open("w") as out:
        out.write("# measured_ms: github huggingface/pytorch-image-models, results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-"
                  "rtx3090.csv, Apache-2.0\n# the rest: planned by benchmarks/published_times.py\n"
                  f"# constants: {constants_mark()}\n")
        table = csv.writer(out, lineterminator="\n")
        table.writerow(("model", "length", "batch", "layout", "class", "fitted", "measured_ms", "planned_ms", "by_flops_ms",
                        "roofline_ms"))
        for row in csv.DictReader(steps.open()):
            path = folder / f"{row['model']}-{row['length']}-{row['batch']}.pkl"
            found = pickle.loads(path.read_bytes()) if row["source"] == "timm" and path.exists() else ""
            if isinstance(found, str):
                continue
            traced = channels_last(found[0]) if row["layout"] else found[0]
            name, every = family(row["model"]), tuple(traced.flops)
            times = (float(row["total_ms"]) / 1e3, seconds(traced, gpu).total,
                     by_flops(sum(traced.flops.values()), gpu.fp16), roofline(traced, gpu, every))
            table.writerow((row["model"], row["length"], row["batch"], "nhwc" if row["layout"] else "nchw",
                            kind_of(name, traced), "yes" if name in fitted else "no", *(f"{value * 1e3:.2f}" for value in times)))


def summary(rows: Iterable[Row]) -> dict[str, float]:
    """Mean absolute, mean and worst error of plans, and the mean absolute errors of the two simpler estimates."""
    rows = list(rows)
    planned, flops, roof = (np.array([getattr(row, name) / row.measured - 1 for row in rows])
                            for name in ("planned", "by_flops", "roofline"))
    return {"rows": len(rows), "planned": float(np.abs(planned).mean()), "mean": float(planned.mean()),
            "worst": float(planned[np.abs(planned).argmax()]), "FLOPs / 0.4 peak": float(np.abs(flops).mean()),
            "roofline": float(np.abs(roof).mean())}


def table(groups: dict[str, list[Row]]) -> str:
    """A Markdown table, a row a group that has any."""
    lines = ["| | times | planned, mean error | signed | worst | FLOPs / 0.4 peak | roofline |", "|---|---|---|---|---|---|---|"]
    for name, rows in groups.items():
        if rows:
            found = summary(rows)
            lines.append(f"| {name} | {found['rows']} | {found['planned']:.1%} | {found['mean']:+.1%} | {found['worst']:+.1%} | "
                         f"{found['FLOPs / 0.4 peak']:.0%} | {found['roofline']:.0%} |")
    return "\n".join(lines)


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """The groups of the published table, by source, GPU and class of model."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.source == "NeuSight":
            part = "inference" if row.kind == "inference" else {"both": "forward and backward"}.get(row.part, row.part + " pass")
            found.setdefault(f"NeuSight, {part}", []).append(row)
            if row.part in ("forward", "backward"):
                found.setdefault(f"NeuSight, {part}, {row.gpu}", []).append(row)
        else:
            where = "channels last" if row.model.endswith("nhwc") else "channels first"
            seen = "held out" if row.held_out else "fitted families"
            found.setdefault(f"timm, {seen}", []).append(row)
            if row.held_out:
                found.setdefault(f"timm, held out, {row.kind}, {where}", []).append(row)
                if row.kind == "transformer":
                    found.setdefault("timm, held out, transformers", []).append(row)
            found.setdefault("timm, all", []).append(row)
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=Path, help="the published times of timm's models, as benchmarks.fit_gpu_steps takes them")
    parser.add_argument("--timm", type=Path, metavar="FOLDER", help="traces of timm's models")
    parser.add_argument("--write", action="store_true", help="keep timm's steps planned anew")
    parser.add_argument("--each", action="store_true", help="print every step, too")
    given = parser.parse_args()
    if given.write:
        write_timm(given.steps, given.timm)
    rows = neusight() + timm()
    if given.each:
        for row in rows:
            print(f"{row.source:9s}{row.gpu:16s}{row.model:45s}{row.part:9s}{row.measured * 1e3:9.1f} ms "
                  f"{row.planned / row.measured - 1:+.1%}{'' if row.held_out else ' fitted'}")
    print(table(groups(rows)))


if __name__ == "__main__":
    main()
