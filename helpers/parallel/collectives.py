"""Collectives by hand, from point-to-point messages: what `torch.distributed` does underneath, short enough to read.

Every rank calls the same function with its own tensor; the result is a new tensor. N ranks, a tensor of S bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.parallel.transport import Transport


def chunks(tensor: Tensor, ranks: int) -> list[Tensor]:
    """The tensor, flat, in `ranks` pieces whose lengths differ by at most one; some are empty when it is short."""
    return list(tensor.flatten().tensor_split(ranks))


def ring_reduce_scatter(transport: Transport, tensor: Tensor) -> list[Tensor]:
    """The ring's first half. Returns the flat pieces, of which piece (rank + 1) % N is the sum over all ranks.

    N-1 steps; in each a rank passes one piece on and adds the one that it is given: S (N-1)/N bytes sent a rank.
    """
    rank, ranks = transport.rank, transport.ranks
    pieces = [piece.clone() for piece in chunks(tensor, ranks)]
    for step in range(ranks - 1):
        out, into = (rank - step) % ranks, (rank - step - 1) % ranks
        transport.send(pieces[out], (rank + 1) % ranks)
        pieces[into] += transport.receive(pieces[into], (rank - 1) % ranks)
    return pieces


def ring_all_gather(transport: Transport, pieces: list[Tensor]) -> list[Tensor]:
    """The ring's second half: piece (rank + 1) % N is this rank's to give; afterwards all pieces are everybody's.

    N-1 steps, S (N-1)/N bytes sent a rank.
    """
    rank, ranks = transport.rank, transport.ranks
    pieces = list(pieces)
    for step in range(ranks - 1):
        out, into = (rank + 1 - step) % ranks, (rank - step) % ranks
        transport.send(pieces[out], (rank + 1) % ranks)
        pieces[into] = transport.receive(pieces[into], (rank - 1) % ranks)
    return pieces


def ring_all_reduce(transport: Transport, tensor: Tensor) -> Tensor:
    """The sum over all ranks, on every rank, bit for bit the same on each (Patarasuk and Yuan 2009).

    2 (N-1) steps and 2 S (N-1)/N bytes sent a rank: hardly more for a thousand ranks than for three. The latency of its
    2 (N-1) messages grows with N, though.
    """
    pieces = ring_all_gather(transport, ring_reduce_scatter(transport, tensor))
    return torch.cat(pieces).view(tensor.shape)


def tree_broadcast(transport: Transport, tensor: Tensor, root: int = 0) -> Tensor:
    """The root's tensor on every rank, in ceil(log2 N) rounds: whoever has it sends it on. Others pass one like it."""
    place = (transport.rank - root) % transport.ranks
    reach, have = 1, tensor.clone() if place == 0 else None
    while reach < transport.ranks:
        if have is not None and place < reach and place + reach < transport.ranks:
            transport.send(have, (transport.rank + reach) % transport.ranks)
        elif reach <= place < 2 * reach:
            have = transport.receive(tensor, (transport.rank - reach) % transport.ranks)
        reach *= 2
    return have


def server_all_reduce(transport: Transport, tensor: Tensor, server: int = 0) -> Tensor:
    """The sum over all ranks by a parameter server: all send to one rank, which adds up and answers each.

    The server sends and receives S (N-1) bytes each way, 2 S (N-1) in all, over one link: what a ring avoids.
    """
    if transport.rank != server:
        transport.send(tensor, server)
        return transport.receive(tensor, server)
    total = tensor.clone()
    others = [rank for rank in range(transport.ranks) if rank != server]
    for rank in others:  # in the order of the ranks, so that the sum is the same each time
        total += transport.receive(tensor, rank)
    for rank in others:
        transport.send(total, rank)
    return total
