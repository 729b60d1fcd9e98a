"""A memory snapshot of whatever runs: PyTorch's own on a GPU, one of the same form on a CPU.

PyTorch records the history of a GPU's memory alone. For a CPU the tracker of plans and runs follows
every tensor, and what it saw is written as PyTorch writes it. `tight_fit.script.snapshot` and the
page https://docs.pytorch.org/memory_viz read both.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tight_fit.trace.storage_trace import BORN, DIES
from tight_fit.trace.tracker import Tracker, steady_memory

OWN = (__file__, sys.modules[Tracker.__module__].__file__)
Frame = dict[str, Any]  # name of the function, filename, line


@contextmanager
def recorded(path: str | Path) -> Iterator[None]:
    """Record what is allocated and freed inside, and write the snapshot, also after an error.

    On a machine with CUDA it is the history of all GPUs, by the three calls of `torch.cuda.memory`
    below. Without CUDA it is that of the tensors which operations make inside; those that exist
    before are not in it. Raises OSError where the file cannot be written.
    """
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history()
        try:
            yield
        finally:
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
        return
    follower = _Follower()
    try:
        with steady_memory(), follower:
            yield
    finally:
        Path(path).write_bytes(pickle.dumps(follower.snapshot()))


class _Follower(Tracker):
    """A tracker that also notes which lines of Python made each storage."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[list[Frame]] = []

    def _born(self, storage: torch.UntypedStorage, category: int, made_by: str) -> None:
        super()._born(storage, category, made_by)
        self.frames.append(_frames())

    def snapshot(self) -> dict[str, Any]:
        """Segments with the blocks in use at the end, and one device's trace of events.

        A CPU has no pool of memory: each block is a segment of its own. No address is used twice.
        """
        sizes, events = self.storage_trace.bytes, []
        addresses = [0]
        for size in sizes:
            addresses.append(addresses[-1] + size)
        alive: dict[int, dict[str, Any]] = {}
        for kind, storage, _, _ in self.storage_trace.events:
            made = {"addr": addresses[storage], "size": sizes[storage]}
            if kind == BORN:
                frames = self.frames[storage]
                events.append({"action": "alloc", **made, "frames": frames, "stream": 0})
                alive[storage] = _segment(made["addr"], made["size"], frames)
            elif kind == DIES:
                del alive[storage]
                events.append({"action": "free_completed", **made, "frames": [], "stream": 0})
        return {"segments": list(alive.values()), "device_traces": [events]}


def _segment(address: int, size: int, frames: list[Frame]) -> dict[str, Any]:
    block = {"address": address, "size": size, "requested_size": size, "frames": frames}
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "stream": 0,
        "segment_type": "large",
        "blocks": [{**block, "state": "active_allocated"}],
    }


def _frames() -> list[Frame]:
    """The functions that are running, the innermost first, without the tracker's own."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in OWN:
            found.append(
                {"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno}
            )
        frame = frame.f_back
    return found
