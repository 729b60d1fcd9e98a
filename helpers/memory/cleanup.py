"""Really giving memory back: what a notebook holds of earlier cells, and CUDA's caches."""

from __future__ import annotations

import gc
import sys

import torch

from tight_fit.torch_private import clear_cublas_workspaces


def release() -> None:
    """Give back what earlier cells hold: outputs, the last error, garbage, the CUDA cache.

    A model stays alive when a cell ended in its name (IPython keeps it in `Out` and `_`), or when
    an exception holds the frames in which it lived. `torch.cuda.empty_cache()` alone frees neither.
    Your own variables stay: delete those yourself.
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
    """Drop what an IPython shell keeps of earlier cells: values, results, tracebacks."""
    for names in (shell.user_ns, shell.user_ns_hidden):  # the second keeps copies for %who
        for name in [name for name in names if name.startswith("_") and name.strip("_").isdigit()]:
            del names[name]
        names.update(dict.fromkeys(("_", "__", "___"), ""))
    for name in ("_", "__", "___"):
        setattr(shell.displayhook, name, "")
    shell.user_ns.get("Out", {}).clear()
    last_result = getattr(shell, "last_execution_result", None)
    if last_result is not None:
        last_result.result = None
    # The traceback of the last error holds every frame in it, and each frame its local variables.
    tracebacks = getattr(shell, "InteractiveTB", None)
    if tracebacks is not None:
        tracebacks.tb = tracebacks.etb_type = tracebacks.evalue = None
