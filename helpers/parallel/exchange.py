"""What the ranks of a tensor-parallel layer ask of each other: three collectives, by hand on a wire or torch's own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.parallel.transport import Transport


class Exchange:
    """One rank's end. Slices are those of `Tensor.tensor_split(ranks, dim)`: they differ by at most one, some may be empty."""

    rank: int
    ranks: int

    def bounds(self, total: int) -> tuple[int, int]:
        """First and one past the last of `total` things that are this rank's."""
        share, odd = divmod(total, self.ranks)
        begin = self.rank * share + min(self.rank, odd)
        return begin, begin + share + (self.rank < odd)

    def mine(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """This rank's slice of a tensor that all ranks have. Sends nothing."""
        return tensor.tensor_split(self.ranks, dim)[self.rank].clone()

    def reduce(self, tensor: Tensor, dim: int = 0, total: int = 0, op: str = "sum") -> Tensor:
        """All-reduce: the "sum" or "max" over the ranks, on all of them. `dim` and `total` do not matter."""
        raise NotImplementedError

    def scatter(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """Reduce-scatter: this rank's slice of the sum over the ranks."""
        raise NotImplementedError

    def gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """All-gather: the slices of all ranks, joined to a length of `total`."""
        raise NotImplementedError


class Ring(Exchange):
    """By hand, in rings of point-to-point messages: over threads or a process group, every byte counted by the wire.

    For a tensor of S bytes a rank sends S (N-1)/N in `scatter` and in `gather`, and twice that in `reduce`.
    """

    def __init__(self, transport: Transport):
        self.transport, self.rank, self.ranks = transport, transport.rank, transport.ranks

    def reduce(self, tensor: Tensor, dim: int = 0, total: int = 0, op: str = "sum") -> Tensor:
        pieces = list(tensor.flatten().tensor_split(self.ranks))
        mine = self._collect(pieces, torch.add if op == "sum" else torch.maximum)
        return torch.cat(self._spread(mine, pieces)).view(tensor.shape)

    def scatter(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        return self._collect(list(tensor.tensor_split(self.ranks, dim)), torch.add)

    def gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = total
        return torch.cat(
            self._spread(tensor, list(tensor.new_empty(shape).tensor_split(self.ranks, dim))), dim
        )

    def _collect(self, pieces: list[Tensor], op) -> Tensor:
        """Piece number `rank`, combined over all ranks: it travels round the ring and ends here."""
        for step in range(self.ranks - 1):
            out, into = (self.rank - 1 - step) % self.ranks, (self.rank - 2 - step) % self.ranks
            self.transport.send(pieces[out], (self.rank + 1) % self.ranks)
            pieces[into] = op(
                pieces[into], self.transport.receive(pieces[into], (self.rank - 1) % self.ranks)
            )
        return pieces[self.rank].clone()

    def _spread(self, mine: Tensor, pieces: list[Tensor]) -> list[Tensor]:
        """All pieces on every rank, of which each brings number `rank`; `pieces` give the shapes."""
        pieces = list(pieces)
        pieces[self.rank] = mine
        for step in range(self.ranks - 1):
            out, into = (self.rank - step) % self.ranks, (self.rank - step - 1) % self.ranks
            self.transport.send(pieces[out], (self.rank + 1) % self.ranks)
            pieces[into] = self.transport.receive(pieces[into], (self.rank - 1) % self.ranks)
        return pieces


class Group(Exchange):
    """torch's own collectives, over a process group (the default group when none is given)."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def reduce(self, tensor: Tensor, dim: int = 0, total: int = 0, op: str = "sum") -> Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(
            tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.group
        )
        return tensor

    def scatter(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        pieces = tensor.tensor_split(self.ranks, dim)
        whole = torch.cat([self._padded(piece, dim, pieces[0].shape[dim]) for piece in pieces])
        mine = torch.empty_like(whole[: len(whole) // self.ranks])
        dist.reduce_scatter_tensor(mine, whole, group=self.group)
        return mine.movedim(0, dim).narrow(dim, 0, pieces[self.rank].shape[dim]).contiguous()

    def gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        longest = -(-total // self.ranks)
        mine = self._padded(tensor, dim, longest)
        whole = mine.new_empty(self.ranks * longest, *mine.shape[1:])
        dist.all_gather_into_tensor(whole, mine, group=self.group)
        lengths = [len(part) for part in torch.arange(total).tensor_split(self.ranks)]
        return torch.cat(
            [part[:length].movedim(0, dim) for part, length in zip(whole.split(longest), lengths)],
            dim,
        )

    @staticmethod
    def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
        """`dim` first, and filled up with zeros: torch's collectives want slices of one length."""
        tensor = tensor.movedim(dim, 0)
        return torch.cat(
            [tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])]
        ).contiguous()
