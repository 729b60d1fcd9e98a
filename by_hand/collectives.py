"""Collectives by hand, made of point-to-point messages: what `torch.distributed` does underneath.

Every rank calls the same function with a tensor of its own; the result is a new tensor. In the
docstrings N is the number of ranks and S the size of the tensor in bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from by_hand.transport import Transport

InPlace = Callable[[Tensor, Tensor], object]  # combines its second argument into its first


def chunks(tensor: Tensor, ranks: int) -> list[Tensor]:
    """The flattened tensor in `ranks` pieces (views) whose lengths differ by at most one.

    Where the tensor has fewer elements than there are ranks, the last pieces are empty.
    """
    return list(tensor.flatten().tensor_split(ranks))


def ring_reduce_scatter(transport: Transport, tensor: Tensor) -> list[Tensor]:
    """The ring's first half: sums the tensor over all ranks and leaves each rank one piece of it.

    Returns N flat pieces, of which piece (rank + 1) % N is the sum over all ranks; the others are
    partial sums. A rank sends S (N-1)/N bytes in N-1 messages.
    """
    pieces = [piece.clone() for piece in chunks(tensor, transport.ranks)]
    ring_reduce_pieces(transport, pieces, (transport.rank + 1) % transport.ranks)
    return pieces


def ring_reduce_pieces(
    transport: Transport, pieces: list[Tensor], own: int, combine: InPlace = Tensor.add_
) -> None:
    """Combine every piece over all ranks, in place, so that piece number `own` is complete here.

    In each of N-1 steps a rank passes one piece to the next rank and combines the piece that it
    receives with its own: a piece travels once round the ring and ends at its owner.

    pieces   N tensors, in shape and dtype the same on every rank
    own      a different number on each rank: its rank plus an offset, modulo N
    combine  changes its first argument; `Tensor.add_` sums
    """
    rank, ranks = transport.rank, transport.ranks
    for step in range(ranks - 1):
        outgoing, incoming = (own - 1 - step) % ranks, (own - 2 - step) % ranks
        transport.send(pieces[outgoing], (rank + 1) % ranks)
        combine(pieces[incoming], transport.receive(pieces[incoming], (rank - 1) % ranks))


def ring_all_gather(
    transport: Transport, pieces: list[Tensor], own: int | None = None
) -> list[Tensor]:
    """The ring's second half: every rank brings one piece and ends with all N pieces.

    pieces  N tensors of which only number `own` is sent; the others give shapes and dtypes
    own     a different number on each rank: its rank plus an offset, modulo N. None stands for
            (rank + 1) % N, the piece that `ring_reduce_scatter` completes on a rank
    A rank sends S (N-1)/N bytes in N-1 messages, where S is the size of all pieces together.
    """
    rank, ranks = transport.rank, transport.ranks
    own = (rank + 1) % ranks if own is None else own
    pieces = list(pieces)  # so that each old piece is free as soon as the new one is there
    for step in range(ranks - 1):
        outgoing, incoming = (own - step) % ranks, (own - 1 - step) % ranks
        transport.send(pieces[outgoing], (rank + 1) % ranks)
        pieces[incoming] = transport.receive(pieces[incoming], (rank - 1) % ranks)
    return pieces


def ring_all_reduce(transport: Transport, tensor: Tensor) -> Tensor:
    """The sum over all ranks, on every rank and with the same bits on each; the tensor's shape.

    A rank sends 2 S (N-1)/N bytes in 2 (N-1) messages (Patarasuk and Yuan 2009): hardly more bytes
    for a thousand ranks than for three, but the latency of the messages grows with N.
    """
    pieces = ring_all_gather(transport, ring_reduce_scatter(transport, tensor))
    return torch.cat(pieces).view(tensor.shape)


def server_all_reduce(transport: Transport, tensor: Tensor, server: int = 0) -> Tensor:
    """The sum over all ranks by a parameter server: all send to one rank, which answers each.

    The server receives S (N-1) bytes and sends as many, all over one link: a ring avoids this.
    """
    if transport.rank != server:
        transport.send(tensor, server)
        return transport.receive(tensor, server)
    total = tensor.clone()
    others = [rank for rank in range(transport.ranks) if rank != server]
    for rank in others:  # in the order of the ranks, so that the sum has the same bits every time
        total += transport.receive(tensor, rank)
    for rank in others:
        transport.send(total, rank)
    return total
