"""Answers to the exercises of notebook 14, right and wrong."""

from functools import partial

import torch

from by_hand.collectives import ring_all_reduce
from tests.exercises import mistakes


def bytes_held(parameters, ranks, stage, numbers=(4, 4, 8)):
    """Of parameters, gradients and states, which stages 3, 2 and 1 divide."""
    divided = (stage >= 3, stage >= 2, stage >= 1)
    return sum(parameters * number / (ranks if cut else 1) for number, cut in zip(numbers, divided))


def stage(parameters, ranks, room, lowest=0, **given):
    for tried in range(lowest, 4):
        if bytes_held(parameters, ranks, tried, **given) <= room:
            return tried
    return "none"


def always_some(parameters, ranks, room):
    found = stage(parameters, ranks, room)
    return 3 if found == "none" else found


def clip(transport, piece, most, wrong=""):
    """`wrong` is the mistake that it makes."""
    rank, ranks = transport.rank, transport.ranks
    if wrong == "sends gradients" and ranks > 1:
        transport.send(torch.zeros(20), (rank + 1) % ranks)
        transport.receive(torch.zeros(20), (rank - 1) % ranks)
    own = piece.norm() if wrong == "adds norms" else piece.square().sum()
    norm = ring_all_reduce(transport, own.reshape(1))
    scale = most / (norm if wrong == "adds norms" else norm.sqrt())
    return piece * (scale if wrong == "always scales" else scale.clamp(max=1.0))


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
        partial(stage, lowest=3), partial(stage, numbers=(4, 4, 4)), always_some,
        lambda parameters, ranks, room: stage(parameters, 1, room), 3,
    ],
    "14.2": [
        *mistakes(clip, "adds norms", "always scales", "sends gradients"),
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
