"""Interrupt the kernel of a notebook half way, then run the notebook again in the same kernel."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from pathlib import Path

import nbformat
import psutil
from jupyter_client.utils import ensure_async
from nbclient import NotebookClient

from tools.course.execute import QUIET, Line, client_for, failures, runs
from tools.course.notebooks import Failed

MARK = "TIGHT_FIT_SOAK_MARK"  # in the environment of the kernel and so of all that it starts
# A cell that still runs is interrupted at a random moment between these seconds after its start.
SOON = (0.3, 1.5)
GRACE = 30.0  # seconds for an interrupted cell to stop, and for the processes it had to go
HELPERS = ("resource_tracker", "forkserver")  # Python's own, which live as long as the kernel


def run_interrupted(
    path: Path,
    environment: dict[str, str],
    folder: Path | None = None,
    chance: random.Random | None = None,
) -> int:
    """Run half of the code cells, interrupt the next that lasts, then run all cells again.

    Returns the index of the interrupted cell. The interrupt is a SIGINT, as Jupyter's stop button
    sends it. `environment` and `folder` are those of `execute`, whose line of progress it prints.
    Raises Failed where a cell fails before or after the interrupt, where no cell of the second half
    lasts long enough, where the interrupted cell does not stop, and where a process is left behind.
    """
    notebook = nbformat.read(path, as_version=4)
    code = [index for index, cell in enumerate(notebook.cells) if runs(cell)]
    line, mark = Line(path.stem, len(code)), uuid.uuid4().hex
    client = client_for(notebook, folder or path.parent, on_cell_start=line.start)

    async def again() -> int:
        async with client.async_setup_kernel(
            env={**os.environ, **QUIET, **environment, MARK: mark}
        ):
            half = len(code) // 2
            for index in code[:half]:
                await client.async_execute_cell(client.nb.cells[index], index)
            where = await _interrupt_one(client, path, code[half:], chance or random.Random(0))
            await _nothing_left(path, mark, f"after the interrupt in cell {where}", kernel=1)
            client.nb = nbformat.read(path, as_version=4)
            client.reset_execution_trackers()
            client.on_cell_executed = line.step
            for index in code:
                await client.async_execute_cell(client.nb.cells[index], index)
            await _nothing_left(path, mark, "after its second run", kernel=1)
        await _nothing_left(path, mark, "after its kernel ended", kernel=0)
        return where

    try:
        with failures(client, path, line):
            where = asyncio.run(again())
    finally:
        line.end()
        for process in marked(mark):
            process.kill()
    print(
        f"{'':32}interrupted in cell {where}, code cell {code.index(where) + 1} of {len(code)}",
        flush=True,
    )
    return where


async def _interrupt_one(
    client: NotebookClient, path: Path, code: list[int], chance: random.Random
) -> int:
    client.allow_errors = True  # an error is expected here, and is looked at below
    for index in code:
        cell = client.nb.cells[index]
        task = asyncio.ensure_future(client.async_execute_cell(cell, index))
        running = not (await asyncio.wait({task}, timeout=chance.uniform(*SOON)))[0]
        if running:
            assert client.km is not None  # as the kernel runs
            await ensure_async(client.km.interrupt_kernel())
            if not (await asyncio.wait({task}, timeout=GRACE))[0]:
                task.cancel()
                raise Failed(
                    f"{path.name}: cell {index} goes on {GRACE:.0f} s after the kernel was "
                    "interrupted."
                )
        await task
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if errors and not running:
            raise Failed(
                f"{path.name} failed in cell {index}: {errors[0].ename}: {errors[0].evalue}"
            )
        if errors:
            client.allow_errors = False
            return index
    raise Failed(
        f"{path.name} has no cell in its second half that lasts long enough to be interrupted."
    )


def marked(mark: str) -> list[psutil.Process]:
    """The living processes with this mark in their environment, without Python's own helpers."""
    processes = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == mark
            if ours and not any(word in " ".join(process.cmdline()) for word in HELPERS):
                processes.append(process)
        except psutil.Error:  # it ended meanwhile, or is another user's
            continue
    return processes


async def _nothing_left(path: Path, mark: str, when: str, kernel: int) -> None:
    """Raise Failed if after GRACE more than `kernel` processes, 1 or 0, are alive."""
    left: list[psutil.Process] = []
    for _ in range(int(GRACE / 0.25)):
        left = marked(mark)
        if len(left) <= kernel:
            return
        await asyncio.sleep(0.25)
    lines = []
    for process in left:
        try:
            lines.append(f"    {process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.Error:
            continue
    known = ", the kernel among them" if kernel else ""
    raise Failed(f"{path.name} left processes behind {when}; alive{known}:\n" + "\n".join(lines))
