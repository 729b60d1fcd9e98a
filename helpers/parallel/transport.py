"""Point-to-point messages between ranks, every byte counted: over a process group, or between threads of one process.

The hand-written collectives need nothing else. Over threads they can be run with any number of ranks in a test or a
notebook's cell; over a group they run between real processes, with gloo or NCCL.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
PATIENCE = 60.0  # seconds that a rank waits for a message before it gives up


@dataclass
class Message:
    """What one rank sent to another, for counting and drawing: `step` counts the sender's messages from 0."""

    sender: int
    receiver: int
    step: int
    bytes: int


@dataclass
class Transport:
    """One rank's end. `sent` lists its messages in order."""

    rank: int
    ranks: int
    sent: list[Message] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return sum(message.bytes for message in self.sent)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor (it may be changed as soon as this returns). Raises ValueError for a rank that is not there."""
        self._check(to)
        self.sent.append(
            Message(self.rank, to, len(self.sent), tensor.numel() * tensor.element_size())
        )
        self._send(tensor.detach().contiguous(), to)

    def receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        """Receive a new tensor of the shape, dtype and device of `like`. Raises ValueError for a rank that is not there,
        TimeoutError when nothing comes."""
        self._check(of)
        return self._receive(like, of)

    def _check(self, other: int) -> None:
        if not 0 <= other < self.ranks or other == self.rank:
            raise ValueError(
                f"Rank {self.rank} of {self.ranks} cannot exchange messages with rank {other}."
            )

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        raise NotImplementedError

    def _receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        raise NotImplementedError


class ProcessGroupTransport(Transport):
    """Over a process group of torch.distributed, by default the one of all ranks. Sends do not wait for the other side;
    `finish` does."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]
        tensor = tensor.clone()
        self._pending.append((dist.isend(tensor, group=self.group, group_dst=to), tensor))

    def _receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(tensor, group=self.group, group_src=of)
        return tensor

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()


class ThreadTransport(Transport):
    """Between threads: a queue for every pair of ranks."""

    def __init__(self, rank: int, queues: Sequence[Sequence[queue.Queue]]):
        super().__init__(rank, len(queues))
        self._queues = queues

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        self._queues[self.rank][to].put(tensor.clone())

    def _receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        try:
            tensor = self._queues[of][self.rank].get(timeout=PATIENCE)
        except queue.Empty:
            raise TimeoutError(
                f"Rank {self.rank} waited {PATIENCE:g} s for a message of rank {of} in vain."
            ) from None
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"Rank {self.rank} expected {tuple(like.shape)} {like.dtype} of rank {of} and got "
                f"{tuple(tensor.shape)} {tensor.dtype}."
            )
        return tensor


def threads(
    ranks: int, work: Callable[[Transport], Result]
) -> tuple[list[Result], list[Transport]]:
    """Run `work(wire)` as `ranks` ranks in threads of this process: (what each returned, each rank's wire).

    Raises ValueError for less than one rank, and what the rank that failed first raised.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1.")
    queues = [[queue.Queue() for _ in range(ranks)] for _ in range(ranks)]
    transports = [ThreadTransport(rank, queues) for rank in range(ranks)]
    results: list = [None] * ranks
    errors: list[BaseException] = []

    def run(transport: Transport) -> None:
        try:
            results[transport.rank] = work(transport)
        except BaseException as error:  # handed to the caller's thread
            errors.append(error)

    workers = [
        threading.Thread(target=run, args=(transport,), daemon=True) for transport in transports
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) and not errors:
        for worker in workers:
            worker.join(0.01)
    if errors:
        raise errors[0]
    return results, transports
