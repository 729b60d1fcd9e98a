"""Measuring a real run's memory, and really giving it back."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass

import torch

from helpers import models
from helpers.data import Encoded
from helpers.memory.timeline import Plan, to_plan
from helpers.memory.trace import trace_step
from helpers.optimizers import make_optimizer, make_scaler
from helpers.recipe import Recipe
from helpers.step import tensor_cores, train_step
from helpers.torch_private import clear_cublas_workspaces

WARM_UP, MEASURED = 2, 3  # optimizer steps before and after the peak counters are reset
SCALES = 32  # halvings from the first loss scale to where nothing can overflow


@dataclass(frozen=True)
class Memory:
    """One recipe's memory, measured. Bytes; None where the machine has no such figure (read it as "n/a").

    tracked    a Plan made from real tensors: categories, timeline, peak
    allocated  most bytes of tensors at once (torch.cuda.max_memory_allocated), less those that were there before
    reserved   most bytes the caching allocator held (torch.cuda.max_memory_reserved), less what it held before
    device     bytes used on the device at the end, by this process and all others (nvidia-smi's figure)
    """

    tracked: Plan
    allocated: int | None
    reserved: int | None
    device: int | None


def measure(recipe: Recipe, data: Encoded, device: str | torch.device = "cpu") -> Memory:
    """Train a few steps of a fresh model to read its memory. A pass of its own: it does not slow a timed one.

    On CUDA first without the tracker (allocated, reserved, device), then one step with it (categories, timeline). What
    you keep on the GPU yourself, such as the model of an earlier cell, is not counted as the step's.
    """
    device = torch.device(device)
    release()
    cuda = device.type == "cuda"
    yours = (
        (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
        if cuda
        else (0, 0)
    )
    with tensor_cores(recipe):
        model = models.build(recipe, device)
        optimizer, scaler = make_optimizer(model, recipe), make_scaler(recipe, device)
        rows = data.lengths.argsort(descending=True, stable=True)[
            : recipe.micro_batch
        ]  # the most a step can take

        def batch():
            return data.batch(rows, device)

        def step():
            batches = (batch() for _ in range(recipe.accumulation))
            train_step(model, optimizer, batches, recipe.batch_size, recipe, scaler=scaler)

        peaks = None, None, None
        for _ in range(
            SCALES
        ):  # fp16 may skip steps until the loss scale is low enough; bitsandbytes has no states until then
            step()
            if optimizer.state:
                break
        if cuda:
            for _ in range(WARM_UP):
                step()
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(MEASURED):
                step()
            torch.cuda.synchronize(device)
            free, total = torch.cuda.mem_get_info(device)
            peaks = (
                torch.cuda.max_memory_allocated(device) - yours[0],
                torch.cuda.max_memory_reserved(device) - yours[1],
                total - free,
            )
        storage_trace = trace_step(model, optimizer, batch, recipe, scaler)
    count = sum(parameter.numel() for parameter in model.parameters())
    tracked = to_plan((storage_trace, count), recipe, device.type)
    del model, optimizer, scaler, storage_trace, step, batch
    release()
    return Memory(tracked, *peaks)


def release() -> None:
    """Give back what earlier cells hold: notebook history, the last error and its frames, garbage, the CUDA cache.

    A model stays alive when a cell ended in its name (IPython keeps it in `Out` and `_`) or when an exception holds
    the frames it lived in; `torch.cuda.empty_cache()` alone frees neither. Your own variables stay: delete those.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None:
            _forget_outputs(shell)
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        clear_cublas_workspaces()  # matrix products take theirs from the same memory
        torch.cuda.empty_cache()


def _forget_outputs(shell) -> None:
    for names in (shell.user_ns, shell.user_ns_hidden):  # the second keeps copies for %who
        for name in [name for name in names if name.startswith("_") and name.strip("_").isdigit()]:
            del names[name]
        names.update(dict.fromkeys(("_", "__", "___"), ""))
    for name in ("_", "__", "___"):
        setattr(shell.displayhook, name, "")
    shell.user_ns.get("Out", {}).clear()
    if (
        getattr(shell, "last_execution_result", None) is not None
    ):  # the value of the cell before this one
        shell.last_execution_result.result = None
    tracebacks = getattr(shell, "InteractiveTB", None)
    if (
        tracebacks is not None
    ):  # it keeps the last error's traceback, and with it every local of every frame
        tracebacks.tb = tracebacks.etb_type = tracebacks.evalue = None
