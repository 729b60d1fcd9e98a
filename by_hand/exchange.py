"""What the ranks of a tensor-parallel layer exchange: three collectives, by hand or by torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from by_hand.collectives import ring_all_gather, ring_reduce_pieces
from by_hand.transport import Transport


class Exchange:
    """One rank's view of the ranks that share a layer.

    Slices are those of `Tensor.tensor_split(ranks, dim)`: their lengths differ by at most one, and
    some are empty where `dim` is shorter than the number of ranks. In all methods `dim` is the
    dimension that is sliced and `total` its whole length.
    """

    rank: int
    ranks: int

    def bounds(self, total: int) -> tuple[int, int]:
        """(first, one past the last) of `total` items that belong to this rank."""
        length, longer = divmod(total, self.ranks)  # the first `longer` slices have one item more
        begin = self.rank * length + min(self.rank, longer)
        return begin, begin + length + (self.rank < longer)

    def local_slice(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """A copy of this rank's slice of a tensor that all ranks have. Sends nothing."""
        return tensor.tensor_split(self.ranks, dim)[self.rank].clone()

    def reduce(self, tensor: Tensor, dim: int = 0, total: int = 0, op: str = "sum") -> Tensor:
        """All-reduce: the "sum" or "max" over the ranks, on all of them. Ignores `dim`, `total`."""
        raise NotImplementedError

    def scatter(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """Reduce-scatter: this rank's slice of the sum over the ranks."""
        raise NotImplementedError

    def gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        """All-gather: the slices of all ranks, joined along `dim`."""
        raise NotImplementedError


class Ring(Exchange):
    """The collectives by hand, in the rings of `by_hand.collectives`.

    It works over threads and over a process group, and the transport counts every byte. For a whole
    tensor of S bytes a rank sends S (N-1)/N bytes in `scatter` and in `gather`, and twice that in
    `reduce`. Slice r ends on rank r; in `ring_all_reduce` it ends on the rank before, and so the
    terms of its sum are added in another order.
    """

    def __init__(self, transport: Transport):
        self.transport, self.rank, self.ranks = transport, transport.rank, transport.ranks

    def reduce(self, tensor: Tensor, dim: int = 0, total: int = 0, op: str = "sum") -> Tensor:
        pieces = self._reduced(tensor.flatten(), 0, op)
        return torch.cat(ring_all_gather(self.transport, pieces, self.rank)).view(tensor.shape)

    def scatter(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        return self._reduced(tensor, dim, "sum")[self.rank]

    def gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = total
        slices = list(tensor.new_empty(shape).tensor_split(self.ranks, dim))
        slices[self.rank] = tensor
        return torch.cat(ring_all_gather(self.transport, slices, self.rank), dim)

    def _reduced(self, tensor: Tensor, dim: int, op: str) -> list[Tensor]:
        """Copies of all slices, of which this rank's own is combined over all ranks."""
        slices = [piece.clone() for piece in tensor.tensor_split(self.ranks, dim)]
        combine = Tensor.add_ if op == "sum" else _maximum_
        ring_reduce_pieces(self.transport, slices, self.rank, combine)
        return slices


def _maximum_(tensor: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(tensor, other, out=tensor)


class Group(Exchange):
    """The collectives of torch, over a process group (None: the default group).

    torch's reduce-scatter and all-gather want slices of one length, so shorter ones are padded.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def reduce(self, tensor: Tensor, dim: int = 0, total: int = 0, op: str = "sum") -> Tensor:
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(
            reduced, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.group
        )
        return reduced

    def scatter(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        slices = tensor.tensor_split(self.ranks, dim)
        longest = slices[0].shape[dim]
        padded = torch.cat([_padded(piece, dim, longest) for piece in slices])
        own = torch.empty_like(padded[: len(padded) // self.ranks])
        dist.reduce_scatter_tensor(own, padded, group=self.group)
        return own.movedim(0, dim).narrow(dim, 0, slices[self.rank].shape[dim]).contiguous()

    def gather(self, tensor: Tensor, dim: int, total: int) -> Tensor:
        longest = -(-total // self.ranks)
        own = _padded(tensor, dim, longest)
        padded = own.new_empty(self.ranks * longest, *own.shape[1:])
        dist.all_gather_into_tensor(padded, own, group=self.group)
        lengths = [len(part) for part in torch.arange(total).tensor_split(self.ranks)]
        slices = [
            piece[:length].movedim(0, dim) for piece, length in zip(padded.split(longest), lengths)
        ]
        return torch.cat(slices, dim)


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with `dim` moved to the front and filled up with zeros to `length`."""
    tensor = tensor.movedim(dim, 0)
    zeros = tensor.new_zeros(length - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, zeros]).contiguous()
