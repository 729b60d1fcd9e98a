"""What lies in the host's memory instead of the GPU's.

The host is the machine that the GPU is in: its CPU and its memory. Tensors that are made inside
`on_host` lie there, and the operations inside are the CPU's. `memory.tracker` asks `is_active` of
each operation, so that a plan tells both memories apart although its tensors have no values and no
device. In a run on a CPU both are the same memory, and the copies are made all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

TO_HOST, FROM_HOST = "to host", "from host"  # the two ways of a copy
# Who is told that the GPU waits for copies: called with the way, and with the number of the latest
# copies that it does not wait for.
listeners: list[Callable[[str, int], object]] = []
_entered = 0  # of the process, as autograd runs a GPU's backward pass in a thread of its own


def is_active() -> bool:
    """Whether what is made now lies in the host's memory."""
    return _entered > 0


@contextmanager
def on_host() -> Iterator[None]:
    """Inside, new tensors lie in the host's memory, and the CPU computes."""
    global _entered
    _entered += 1
    try:
        yield
    finally:
        _entered -= 1


def tell_of_wait(way: str, still: int = 0) -> None:
    """Say that the GPU's computation waits for all but the last `still` copies of a way."""
    for listener in listeners:
        listener(way, still)
