"""Streams, events and the choice of a device, as torch.cuda has them, where kernels run at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.cuda._utils import _get_device_index


class Stream:
    """The only stream of a GPU, on which everything has already been done."""

    def __init__(self, device: object = None, priority: int = 0, **rest):
        self.device = torch.device("cuda", _get_device_index(device, optional=True))
        self.device_index, self.device_type = self.device.index, 1
        self.cuda_stream = self.stream_id = 0

    def synchronize(self) -> None:
        StreamEvent.waits(1)

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: StreamEvent) -> None:
        pass

    def query(self) -> bool:
        StreamEvent.waits(1)
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: StreamEvent | None = None) -> StreamEvent:
        event = event or StreamEvent()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *raised) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.device)


class StreamEvent:
    """A moment, by the clock of the host; used without `enable_timing` it refuses to give times."""

    # Counts so many more waits of the host for a GPU, and gives their number (PretendedCUDA).
    waits: Callable[[int], int]

    def __init__(self, enable_timing: bool = False, **rest):
        self.enable_timing, self.moment = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        self.moment, self.waited = time.perf_counter(), self.waits(0)

    def synchronize(self) -> None:
        self.waits(1)

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        self.waits(1)
        return True

    def elapsed_time(self, end: StreamEvent) -> float:
        """Milliseconds, as CUDA gives them, with CUDA's own refusals.

        Raises RuntimeError where the host has not waited for a GPU since an event was recorded: a
        real one may not have come there yet.
        """
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.moment is None or end.moment is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.waits(0) in (self.waited, end.waited):
            raise RuntimeError("CUDA error: device not ready (torch.cuda.synchronize() waits)")
        return (end.moment - self.moment) * 1000
