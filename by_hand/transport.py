"""Point-to-point messages between ranks, every byte counted.

They go over a process group of `torch.distributed`, between real processes with gloo or NCCL, or
between threads of one process, where a test or a notebook's cell can have any number of ranks. The
collectives of `by_hand.collectives` and the pipeline need nothing else.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from tight_fit.checks import whole

Result = TypeVar("Result")
PATIENCE = 60.0  # seconds that a rank of threads waits for a message before it gives up


@dataclass
class Message:
    """What one rank sent to another: `step` counts the sender's messages from 0; size in bytes."""

    sender: int
    receiver: int
    step: int
    bytes: int


@dataclass
class Transport:
    """One rank's end of the messages between `ranks` ranks. `sent` lists what it sent, in order."""

    rank: int
    ranks: int
    sent: list[Message] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return sum(message.bytes for message in self.sent)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to rank `to`. The tensor may be changed as soon as this returns.

        Raises ValueError where `to` is this rank itself or no rank.
        """
        self._check(to)
        self.sent.append(
            Message(self.rank, to, len(self.sent), tensor.numel() * tensor.element_size())
        )
        self._send(tensor.detach().contiguous(), to)

    def receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        """A new tensor from rank `of`, in shape, dtype and device as `like`.

        Raises ValueError where `of` is this rank itself or no rank; over threads also where another
        shape or dtype comes, and TimeoutError where nothing comes for `PATIENCE` seconds.
        """
        self._check(of)
        return self._receive(like, of)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived, where sending does not wait for it."""

    def _check(self, other: int) -> None:
        if not 0 <= other < self.ranks or other == self.rank:
            raise ValueError(
                f"Rank {self.rank} of {self.ranks} cannot exchange messages with rank {other}: "
                f"name another rank from 0 to {self.ranks - 1}."
            )

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        raise NotImplementedError

    def _receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        raise NotImplementedError


class ProcessGroupTransport(Transport):
    """Messages over a process group of `torch.distributed` (None: the group of all ranks).

    Sends do not wait for the receiver; `finish` does. Tensors are kept until they have been sent.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]
        tensor = tensor.clone()
        work = self._start_sending(tensor, to)
        assert work is not None  # torch gives None only to a process outside the group
        self._pending.append((work, tensor))

    def _start_sending(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        return dist.isend(tensor, group=self.group, group_dst=to)

    def _receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(tensor, group=self.group, group_src=of)
        return tensor

    def finish(self) -> None:
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()


class PipelineTransport(ProcessGroupTransport):
    """Messages over a group (None: of all ranks), with two-way traffic that cannot block over NCCL.

    NCCL works through the messages of one communicator in order, so two ranks that both send first
    would wait for each other for ever. Over NCCL each direction between two ranks therefore gets a
    communicator of its own; gloo needs none. All ranks, also those of other groups, must make their
    transports at the same time.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._one_way: dict[tuple[int, int], dist.ProcessGroup] = {}
        if "nccl" in dist.get_backend_config(group):  # for tensors of GPUs, at least
            self._connect()

    def _connect(self) -> None:
        """A communicator for each direction between two ranks of this group.

        Every process makes those of every group, in one order: torch names a new group by how many
        a process has made, and ranks that name it differently would wait for each other for ever.
        """
        groups: list = [None] * dist.get_world_size()
        dist.all_gather_object(groups, self._members)
        for members in dict.fromkeys(map(tuple, groups)):
            for sender, receiver in itertools.permutations(range(len(members)), 2):
                pair = dist.new_group([members[sender], members[receiver]])
                if list(members) == self._members and self.rank in (sender, receiver):
                    self._one_way[sender, receiver] = pair

    def _start_sending(self, tensor: torch.Tensor, to: int) -> dist.Work | None:
        group = self._one_way.get((self.rank, to), self.group)
        return dist.isend(tensor, self._members[to], group=group)

    def _receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        group = self._one_way.get((of, self.rank), self.group)
        dist.recv(tensor, self._members[of], group=group)
        return tensor


class ThreadTransport(Transport):
    """Messages between threads of one process: `queues[sender][receiver]`, one for every pair."""

    def __init__(self, rank: int, queues: Sequence[Sequence[queue.Queue[torch.Tensor]]]):
        super().__init__(rank, len(queues))
        self._queues = queues

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        self._queues[self.rank][to].put(tensor.clone())

    def _receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        try:
            tensor = self._queues[of][self.rank].get(timeout=PATIENCE)
        except queue.Empty:
            raise TimeoutError(
                f"Rank {self.rank} waited {PATIENCE:g} seconds for a message from rank {of}, and "
                "none came: let every rank send what the others receive, in the same order."
            ) from None
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"Rank {self.rank} expected {tuple(like.shape)} {like.dtype} from rank {of} and "
                f"received {tuple(tensor.shape)} {tensor.dtype}: pass a `like` of what is sent."
            )
        return tensor


def threads(
    ranks: int, work: Callable[[Transport], Result]
) -> tuple[list[Result], list[Transport]]:
    """Run `work(transport)` as `ranks` ranks, each in a thread of this process.

    Returns (what each rank's work returned, each rank's transport), both in the order of the ranks.
    Raises ValueError for less than one rank, and otherwise what the rank that failed first raised.
    """
    whole("ranks", ranks, 1)
    queues: list[list[queue.Queue[torch.Tensor]]] = [
        [queue.Queue() for _ in range(ranks)] for _ in range(ranks)
    ]
    transports: list[Transport] = [ThreadTransport(rank, queues) for rank in range(ranks)]
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(transport: Transport) -> None:
        try:
            results[transport.rank] = work(transport)
        except BaseException as error:  # it is raised again in the thread of the caller
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
    return [results[rank] for rank in range(ranks)], transports
