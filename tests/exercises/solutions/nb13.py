"""Answers to the exercises of notebook 13, right and wrong."""

from functools import partial


def exposed(size, ranks, bandwidth, backward, rings=2):
    return max(0, rings * (size - size / ranks) / bandwidth - backward)


def reduce_scatter(transport, tensor, side=1, missing=0, copied=True):
    rank, ranks = transport.rank, transport.ranks
    parts = tensor.flatten().tensor_split(ranks)
    parts = [part.clone() if copied else part for part in parts]
    for step in range(ranks - 1 - missing):
        give, take = (rank + side * (1 + step)) % ranks, (rank + side * (2 + step)) % ranks
        transport.send(parts[give], (rank - side) % ranks)
        parts[take] += transport.receive(parts[take], (rank + side) % ranks)
    return parts[rank].clone()


def whole_tensors(transport, tensor):
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(transport.ranks - 1):
        transport.send(passing, (transport.rank - 1) % transport.ranks)
        passing = transport.receive(passing, (transport.rank + 1) % transport.ranks)
        total += passing
    return total.tensor_split(transport.ranks)[transport.rank]


def staleness(events):
    updates, pulled, found = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulled[worker] = updates
        else:
            found.append(updates - pulled[worker])
            updates += 1
    return found


def others_only(events):
    found = []
    for place, (kind, worker) in enumerate(events):
        if kind == "push":
            pull = max(at for at in range(place) if events[at] == ("pull", worker))
            found.append(sum(what == "push" and who != worker for what, who in events[pull:place]))
    return found


RIGHT = {"13.1": exposed, "13.2": reduce_scatter, "13.3": 3, "13.4": staleness}
WRONG = {
    "13.1": [
        partial(exposed, rings=1),
        lambda size, ranks, bandwidth, backward: max(0, 2 * size / bandwidth - backward),
        lambda size, ranks, bandwidth, backward: 2 * (size - size / ranks) / bandwidth - backward,
        lambda size, ranks, bandwidth, backward: 2 * (size - size / ranks) / bandwidth, 5,
    ],
    "13.2": [
        partial(reduce_scatter, copied=False), partial(reduce_scatter, side=-1),
        partial(reduce_scatter, missing=1), whole_tensors,
        lambda transport, tensor: tensor.tensor_split(transport.ranks)[transport.rank], 3,
    ],
    "13.3": [4, 1.5, 1 / 3, 1, "3", 9, 1 / 6],
    "13.4": [
        others_only, lambda events: [value + 1 for value in staleness(events)],
        lambda events: sum(staleness(events)), lambda events: [], 3,
    ],
}  # fmt: skip
