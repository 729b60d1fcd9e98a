"""Executing one notebook in a fresh kernel of this very interpreter, with a progress line."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbclient
import nbformat
import zmq
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode
from traitlets import default

from tools.course.notebooks import Failed, OutOfTime

CELL_SECONDS = 900  # a cell that takes longer hangs
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
QUIET = {
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::FutureWarning",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # the kernel's debugger else prints a warning of its own
}


class _ThisPython(KernelSpecManager):
    """Knows one kernel, the running interpreter, whatever kernels the machine has installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


class _Kernel(AsyncKernelManager):
    @default("kernel_spec_manager")
    def _this_python(self):
        return _ThisPython(parent=self)

    # jupyter_client has this trait from release 8.7 on; without encryption newer kernels warn of an
    # open port.
    @default("transport_encryption")
    def _encrypted(self):
        return "auto" if zmq.has("curve") else "disabled"


def execute(
    path: Path,
    environment: dict[str, str],
    folder: Path | None = None,
    until: float = float("inf"),
) -> tuple[NotebookNode, float]:
    """(the executed notebook, wall-clock seconds). Prints one line of progress.

    environment  variables of the kernel beside those of this process
    folder       where the kernel runs; None takes the notebook's own folder
    until        the moment (time.monotonic) at which it is stopped
    Raises Failed at the first cell that fails or hangs, and when the kernel dies; OutOfTime at
    `until`.
    """
    notebook = nbformat.read(path, as_version=4)
    line = Line(path.stem, sum(map(runs, notebook.cells)))

    def left(cell: NotebookNode) -> int:
        return max(1, math.ceil(min(CELL_SECONDS, until - time.monotonic())))

    client = client_for(
        notebook,
        folder or path.parent,
        timeout_func=left,
        on_cell_start=line.start,
        on_cell_executed=line.step,
    )
    try:
        with failures(client, path, line):
            client.execute(env={**os.environ, **QUIET, **environment})
    except Failed as error:
        if time.monotonic() >= until:
            raise OutOfTime(f"{path.name} was stopped when its time was over.") from error
        raise
    finally:
        seconds = line.end()
    return notebook, seconds


def client_for(notebook: NotebookNode, folder: Path, **more) -> nbclient.NotebookClient:
    """A client that executes `notebook` in a fresh kernel of this Python, which runs in `folder`.

    `more` is passed to nbclient.
    """
    return nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        kernel_manager_class=_Kernel,
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        **more,
    )


@contextmanager
def failures(client: nbclient.NotebookClient, path: Path, line: Line) -> Iterator[None]:
    """Raise Failed for a cell that raises or hangs, and for a kernel that dies, inside the context.

    `line` knows which cell runs.
    """
    try:
        yield
    except Exception as error:
        if getattr(client, "_async_cleanup_kernel_future", None):
            # nbclient took the signal and ended the kernel. Its other tasks then fail as well, and
            # their errors would hide what happened.
            logging.getLogger("asyncio").disabled = True
            raise KeyboardInterrupt from None
        if isinstance(error, (CellControlSignal, DeadKernelError)):
            raise Failed(_report(path, client.nb, line.index, error)) from None
        raise


def runs(cell: NotebookNode) -> bool:
    """Whether there is anything in the cell to execute."""
    return cell.cell_type == "code" and bool(cell.source.strip())


def _report(path: Path, notebook: NotebookNode, index: int | None, error: Exception) -> str:
    if index is None:
        return f"{path.name} failed before its first cell: {error}"
    cell = notebook.cells[index]
    source = "\n".join("    " + text for text in cell.source.splitlines())
    count = sum(map(runs, notebook.cells[: index + 1]))
    errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
    if errors:
        shown = "\n".join(errors[0].traceback)
    else:
        shown = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    where = f"cell {index} (code cell {count} of {sum(map(runs, notebook.cells))})"
    return (
        f"{path.name} failed in {where}:\n\n{source}\n\n"
        f"{COLOURS.sub('', shown)}\n\nNothing of {path.name} was kept."
    )


LOG_SECONDS = 15  # between two lines about one notebook in a log


class Line:
    """One line of progress: rewritten in a terminal; in a log one more every `LOG_SECONDS`."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.done, self.begun = name, total, 0, time.perf_counter()
        self.index: int | None = None  # of the cell that runs
        self.said = self.begun  # when the log was last written to
        self.live = sys.stdout.isatty()
        print(f"{name:32}", end="", flush=True)

    def _state(self) -> str:
        return f"{self.done:3}/{self.total} cells {time.perf_counter() - self.begun:6.1f} s"

    def start(self, cell_index: int, **_) -> None:
        self.index = cell_index

    def step(self, execute_reply: dict, **_) -> None:
        self.done += execute_reply["content"]["status"] == "ok"
        if self.live:
            print(f"\r{self.name:32}{self._state()}", end="", flush=True)
        elif time.perf_counter() - self.said > LOG_SECONDS:
            self.said = time.perf_counter()
            print(f"{self._state()}\n{self.name:32}", end="", flush=True)

    def end(self) -> float:
        print(f"\r{self.name:32}{self._state()}" if self.live else self._state(), flush=True)
        return time.perf_counter() - self.begun
