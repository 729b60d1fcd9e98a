"""Answers to the exercises of notebook 14, right and wrong."""

import torch

from by_hand.collectives import ring_all_reduce


def bytes_held(parameters, ranks, stage, numbers=(4, 4, 8)):
    """Of parameters, gradients and states, which stages 3, 2 and 1 divide."""
    divided = (stage >= 3, stage >= 2, stage >= 1)
    return sum(parameters * number / (ranks if cut else 1) for number, cut in zip(numbers, divided))


def stage(parameters, ranks, room, **given):
    for lowest in range(4):
        if bytes_held(parameters, ranks, lowest, **given) <= room:
            return lowest
    return "none"


def highest(parameters, ranks, room):
    return 3 if bytes_held(parameters, ranks, 3) <= room else "none"


def one_state(parameters, ranks, room):
    return stage(parameters, ranks, room, numbers=(4, 4, 4))


def always_some(parameters, ranks, room):
    found = stage(parameters, ranks, room)
    return 3 if found == "none" else found


def clip(transport, piece, most):
    norm = ring_all_reduce(transport, piece.square().sum().reshape(1)).sqrt()
    return piece * torch.clamp(most / norm, max=1.0)


def norms_added(transport, piece, most):
    norm = ring_all_reduce(transport, piece.norm().reshape(1))
    return piece * torch.clamp(most / norm, max=1.0)


def always_scaled(transport, piece, most):
    return piece * most / ring_all_reduce(transport, piece.square().sum().reshape(1)).sqrt()


def sends_gradients(transport, piece, most):
    rank, ranks = transport.rank, transport.ranks
    if ranks > 1:
        transport.send(torch.zeros(20), (rank + 1) % ranks)
        transport.receive(torch.zeros(20), (rank - 1) % ranks)
    return clip(transport, piece, most)


def reshard(shards, ranks):
    whole = torch.cat(shards)
    parts = list(whole.chunk(ranks))
    return parts + [whole[:0]] * (ranks - len(parts))


def evenly(shards, ranks):
    return list(torch.cat(shards).tensor_split(ranks))


def psis(stage, micro):
    return {0: 2, 1: 2, 2: 1 + micro, 2.5: 2 * micro, 3: 3 * micro}[stage]


RIGHT = {"14.1": stage, "14.2": clip, "14.3": reshard, "14.4": psis}
WRONG = {
    "14.1": [
        highest, one_state, always_some,
        lambda parameters, ranks, room: stage(parameters, 1, room), 3,
    ],
    "14.2": [
        norms_added, always_scaled, sends_gradients,
        lambda transport, piece, most: piece, 3,
    ],
    "14.3": [
        evenly, lambda shards, ranks: list(torch.cat(shards).chunk(ranks)),
        lambda shards, ranks: shards[:ranks], lambda shards, ranks: torch.cat(shards), 3,
    ],
    "14.4": [
        lambda stage, micro: 2 if stage == 2 else psis(stage, micro),
        lambda stage, micro: {0: 2 * micro, 1: 1 + micro}.get(stage, psis(stage, micro)),
        lambda stage, micro: 1 + micro if stage == 2.5 else psis(stage, micro),
        lambda stage, micro: 3 * micro, 2,
    ],
}  # fmt: skip
