"""Measuring the memory of a real run, and really giving memory back."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass

import torch

from helpers import models
from helpers.data import Encoded
from helpers.recipe import Recipe
from tight_fit.memory.plan import Plan, to_plan
from tight_fit.techniques import four_bits
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import Batch, tensor_cores, train_step
from tight_fit.torch_private import clear_cublas_workspaces
from tight_fit.trace.steps import trace_step
from tight_fit.trace.storage_trace import StorageTrace

WARM_UP, MEASURED = 2, 3  # optimizer steps before and after the peak counters are reset
SCALES = 32  # halvings from the first loss scale to where nothing can overflow
Peaks = tuple[int | None, int | None, int | None]  # allocated, reserved, device


@dataclass(frozen=True)
class Memory:
    """One recipe's memory, measured. Bytes; None where the machine has no such figure.

    tracked    a Plan made from real tensors: categories, timeline, peak
    allocated  most bytes of tensors at once (torch.cuda.max_memory_allocated), less those that were
               there before
    reserved   most bytes that the caching allocator held (torch.cuda.max_memory_reserved), less
               what it held before
    device     bytes in use on the device at the end, by this process and all others (nvidia-smi's
               figure)
    """

    tracked: Plan
    allocated: int | None
    reserved: int | None
    device: int | None


def measure(recipe: Recipe, data: Encoded, device: str | torch.device = "cpu") -> Memory:
    """Train a few steps of a fresh model on the longest examples of `data` to read its memory.

    A pass of its own, so that it does not slow one that is timed. On CUDA it runs first without the
    tracker (allocated, reserved, device), then one step with it (categories, timeline). What you
    keep on the GPU yourself, such as the model of an earlier cell, does not count as the step's.
    """
    device = torch.device(device)
    release()
    with tensor_cores(recipe):
        trace, parameters, peaks = _train_a_few_steps(recipe, data, device)
    release()  # the model and its optimizer lived in the function alone: nothing holds them now
    return Memory(to_plan((trace, parameters), recipe, device.type), *peaks)


def _train_a_few_steps(
    recipe: Recipe, data: Encoded, device: torch.device
) -> tuple[StorageTrace, int, Peaks]:
    """The trace of one steady step, the model's number of parameters, and CUDA's peaks."""
    cuda = device.type == "cuda"
    held = torch.cuda.memory_allocated(device) if cuda else 0
    held_reserved = torch.cuda.memory_reserved(device) if cuda else 0
    model = models.build(recipe, device)
    optimizer, scaler = make_optimizer(model, recipe), make_scaler(recipe, device)
    longest = data.lengths.argsort(descending=True, stable=True)[: recipe.micro_batch]

    def batch() -> Batch:
        return data.batch(longest, device)

    def step() -> None:
        micro_batches = (batch() for _ in range(recipe.accumulation))
        train_step(model, optimizer, micro_batches, recipe.batch_size, recipe, scaler=scaler)

    # fp16 skips steps until its loss scale is low enough. Until a step is taken, bitsandbytes'
    # optimizers have no states.
    for _ in range(SCALES):
        step()
        if optimizer.state:
            break
    peaks: Peaks = None, None, None
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
            torch.cuda.max_memory_allocated(device) - held,
            torch.cuda.max_memory_reserved(device) - held_reserved,
            total - free,
        )
    if scaler is not None and scaler.is_enabled() and recipe.accumulation > 2:
        # Two micro-batches are traced, as if they were all: their gradients are larger, and a step
        # that overflows would be left out.
        scaler.update(scaler.get_scale() / recipe.accumulation)
    trace = trace_step(model, optimizer, batch, recipe, scaler)
    return trace, four_bits.count_parameters(model), peaks


def release() -> None:
    """Give back what earlier cells hold: outputs, the last error, garbage, the CUDA cache.

    A model stays alive when a cell ended in its name (IPython keeps it in `Out` and `_`), or when
    an exception holds the frames in which it lived. `torch.cuda.empty_cache()` alone frees neither.
    Your own variables stay: delete those yourself.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        _forget_outputs(shell)
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        clear_cublas_workspaces()  # matrix products take theirs from the same memory
        torch.cuda.empty_cache()


def _forget_outputs(shell) -> None:
    """Drop what an IPython shell keeps of earlier cells: values, results, tracebacks."""
    shell.displayhook.flush()
    shell.user_ns_hidden.update(dict.fromkeys(("_", "__", "___"), ""))  # copies for %who
    for names in (shell.user_ns, shell.user_ns_hidden):
        names.pop("_0", None)  # of a cell that was run without a number
    if (last_result := getattr(shell, "last_execution_result", None)) is not None:
        last_result.result = None
    # The traceback of the last error holds every frame in it, and each frame its local variables.
    tracebacks = getattr(shell, "InteractiveTB", None)
    if tracebacks is not None:
        tracebacks.tb = tracebacks.etb_type = tracebacks.evalue = None
