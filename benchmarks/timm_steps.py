"""The training step of timm's published benchmark, traced without values.

timm's benchmark.py of 2022 (github huggingface/pytorch-image-models, commit 066e490, Apache-2.0)
times forward, loss, backward and optimizer together: autocast fp16 without a loss scaler, gradients
set to zero and kept, SGD with Nesterov momentum 0.9 as a loop over parameters (PyTorch 1.12 had no
foreach default), attention written out (PyTorch 1.12 had no fused attention).

    python -m benchmarks.timm_steps STEPS.csv FOLDER      traces every model once into FOLDER (half
                                                          an hour)
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from tight_fit.command.arguments import new_folder
from tight_fit.command.wrapper import run as run_command
from tight_fit.kernels.op import Op
from tight_fit.kernels.trace_ops import TraceOps
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.packages import needs
from tight_fit.torch_private import DynamicOutputShapeException
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues


def import_timm():
    """timm, which writes attention out."""
    os.environ["TIMM_FUSED_ATTN"] = "0"
    needs("timm")
    import timm

    return timm


def trace(name: str, length: int, batch: int) -> tuple[TracedOps, int]:
    """(operations of one step of timm's benchmark, number of parameters); images are length ×
    length."""
    timm = import_timm()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with fake, FakeValues():
            model = _made(timm, name, length)
    except (RuntimeError, DynamicOutputShapeException):  # it looks at values while it is made
        model = _without_values(_made(timm, name, length), fake)
    with fake, FakeValues(), CudaKernels(SimpleNamespace(precision="fp16")):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        images = torch.zeros(batch, 3, length, length)
        with TraceOps() as ops:
            with torch.autocast("cpu", torch.float16):
                ops.phase("forward")
                output = model(images)
                output = output[0] if isinstance(output, tuple) else output
                loss = F.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.long))
                ops.phase("backward")
                loss.backward()
            ops.phase("optimizer")
            optimizer.step()
        return ops.traced, sum(parameter.numel() for parameter in model.parameters())


def _made(timm, name: str, length: int) -> nn.Module:
    made = timm.models.get_pretrained_cfg(name) if timm.is_model(name) else None
    usual = made is not None and length in (
        made.input_size[-1],
        (made.test_input_size or made.input_size)[-1],
    )
    try:
        return timm.create_model(
            name, **({} if usual and made.input_size[-1] == length else {"img_size": length})
        ).train()
    except TypeError:  # a model of convolutions takes images of any size
        return timm.create_model(name).train()


def _without_values(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    empty = fake.from_tensor(tensor.detach())
                    table[name] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    return model


def channels_last(traced: TracedOps) -> TracedOps:
    """The same step with images kept channels last."""

    def turned(op):
        layout = op.layout or ("nchw" if op.kind == "batch_norm" else "")
        return op._replace(layout=layout.replace("nchw", "nhwc"))

    return TracedOps([tuple(map(turned, ops)) for ops in traced.ops], traced.order)


def trace_path(folder: Path, model: str, length: int | str, batch: int | str) -> Path:
    """Where the trace of one of timm's steps is kept."""
    return folder / f"{model}-{length}-{batch}.json"


def read_trace(folder: Path, row: Mapping[str, str]) -> TracedOps | None:
    """The trace of a row of the published steps; None where there is none."""
    path = trace_path(folder, row["model"], row["length"], row["batch"])
    if row["source"] != "timm" or not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf8"))
    if "failed" in kept:
        return None
    kernels = [tuple(_op(values) for values in ops) for ops in kept["ops"]]
    traced = TracedOps(kernels, [(index, phase) for index, phase in kept["order"]])
    return channels_last(traced) if row["layout"] else traced


def traces(steps: Path, folder: Path) -> Iterator[tuple[dict[str, str], TracedOps]]:
    """(row, its trace) of every published step in the file `steps` that could be traced."""
    with steps.open(encoding="utf8") as file:
        for row in csv.DictReader(file):
            traced = read_trace(folder, row)
            if traced is not None:
                yield row, traced


def _op(values: list) -> Op:
    op = Op(*values)
    return op._replace(shape=tuple(op.shape))


def main() -> None:
    """Trace every model."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timm_steps",
        description="Trace the training step of every model of timm's published benchmark.",
    )
    parser.add_argument("steps", type=Path, metavar="STEPS.csv", help="published times")
    parser.add_argument("folder", type=new_folder, metavar="FOLDER", help="for the traces")
    given = parser.parse_args()
    with given.steps.open(encoding="utf8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "timm"]
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    todo = sorted({(row["model"], int(row["length"]), int(row["batch"])) for row in rows})
    random.Random(0).shuffle(todo)
    for name, length, batch in todo:
        path = trace_path(folder, name, length, batch)
        if path.exists():
            continue
        begin = time.perf_counter()
        try:
            traced = trace(name, length, batch)[0]
            kept = {"ops": traced.ops, "order": traced.order}
        except Exception as error:  # a model that timm has no more, or that needs its values
            kept = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        path.write_text(json.dumps(kept), encoding="utf8")
        told = kept.get("failed") or len(kept["order"])
        print(name, length, batch, told, f"{time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m benchmarks.timm_steps"))
