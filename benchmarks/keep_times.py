"""Plan timm's published steps anew and keep them, and by how much published times are missed.

    python -m benchmarks.keep_times steps.csv FOLDER

steps.csv holds the published times as `benchmarks.fit_gpu_steps` takes them, FOLDER what
`benchmarks.timm_steps` traced. Writes benchmarks/data/timm_rtx3090.csv, which the table and the
tests read, and the intervals in tight_fit/kernels/constants.json.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
from pathlib import Path

import numpy as np

from benchmarks.comparison import write_constants
from benchmarks.fit_gpu_steps import family
from benchmarks.pages import DATA
from benchmarks.published_times import Row, by_flops, neusight, qwen, roofline, timm
from benchmarks.timm_steps import traces
from tight_fit.command.wrapper import run as run_command
from tight_fit.gpus.specs import SPECS
from tight_fit.kernels.kernel_time import constants
from tight_fit.kernels.step_seconds import seconds
from tight_fit.kernels.traced_ops import TracedOps

TRANSFORMERS = set(
    "beit cait coat convit crossvit deit levit nest pit swin swinv tnt twins visformer vit volo"
    " xcit".split()
)
MIXERS = set("mixer gmixer gmlp resmlp poolformer convmixer sequencer".split())
COLUMNS = (
    "model length batch layout class fitted measured_ms planned_ms by_flops_ms roofline_ms".split()
)
SOURCE = """# measured_ms: github huggingface/pytorch-image-models, Apache-2.0,
# results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv
# the rest: planned by benchmarks/keep_times.py
"""


def kind_of(family: str, traced: TracedOps) -> str:
    """What decides how a vision model runs."""
    if family in TRANSFORMERS:
        return "transformers"
    if family in MIXERS:
        return "patch mixers"
    kinds = {
        (op.kind, op.kind == "convolution" and op.shape[0] > 1) for ops in traced.ops for op in ops
    }
    if ("convolution", True) in kinds:
        return "grouped convolutions"
    return "depthwise convolutions" if ("depthwise", False) in kinds else "convolutions"


def constants_mark() -> str:
    """A mark of the constants, to tell whether kept plans were made by them."""
    found = {name: value for name, value in constants()["shared"].items() if name != "error"}
    return hashlib.sha256(
        json.dumps([found, constants()["gpus"]], sort_keys=True).encode()
    ).hexdigest()[:12]


def write_timm(steps: Path, folder: Path) -> None:
    """Plan timm's steps anew and keep them in benchmarks/data/timm_rtx3090.csv."""
    gpu, fitted = SPECS["RTX 3090"], set(constants()["fitted families"])
    with (DATA / "timm_rtx3090.csv").open("w") as out:
        out.write(SOURCE + f"# constants: {constants_mark()}\n")
        table = csv.writer(out, lineterminator="\n")
        table.writerow(COLUMNS)
        for row, traced in traces(steps, folder):
            name, every = family(row["model"]), tuple(traced.flops)
            times = (
                float(row["total_ms"]) / 1e3,
                seconds(traced, gpu).total,
                by_flops(sum(traced.flops.values()), gpu.fp16),
                roofline(traced, gpu, every),
            )
            table.writerow(
                (
                    row["model"],
                    row["length"],
                    row["batch"],
                    "nhwc" if row["layout"] else "nchw",
                    kind_of(name, traced),
                    "yes" if name in fitted else "no",
                    *(f"{value * 1e3:.2f}" for value in times),
                )
            )


def write_intervals(rows: list[Row]) -> None:
    """Keep in constants.json by how much nine of ten held-out times were missed, by whether the
    GPU's kernels were fitted."""
    clean = [
        row
        for row in rows
        if row.held_out
        and (row.source != "NeuSight" or row.kind == "inference" or row.part == "backward")
    ]
    errors = {}
    for name, measured in (("measured", True), ("derived", False)):
        missed = [
            abs(row.planned / row.measured - 1)
            for row in clean
            if SPECS[row.gpu].measured == measured
        ]
        errors[name] = round(float(np.quantile(missed, 0.9)), 2)
    write_constants(lambda kept: kept | {"shared": kept["shared"] | {"error": errors}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    write_timm(given.steps, given.folder)
    write_intervals(neusight() + timm() + qwen())


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m benchmarks.keep_times"))
