"""Answers to the exercises of notebook 25, right and wrong."""

import random
from functools import partial


def number(name):
    return int(name.removeprefix("step-"))


def newest(folders, by=number, unfinished=False):
    whole = [name for name, files in folders.items() if unfinished or ".metadata" in files]
    return number(max(whole, key=by, default="step-0"))


def share(step, batch, examples, rank, ranks, again=True):
    """The same order in all epochs with again=False."""
    epoch, place = divmod(step, examples // batch)
    order = list(range(examples))
    if again:
        random.Random(epoch).shuffle(order)
    return order[place * batch : (place + 1) * batch][rank::ranks]


def per_rank(step, batch, examples, rank, ranks):
    """As a sampler that deals the examples of an epoch out to the ranks first."""
    order = list(range(examples))
    random.Random(step * batch // examples).shuffle(order)
    mine = order[rank::ranks]
    first = step * (batch // ranks) % len(mine)
    return mine[first : first + batch // ranks]


def each_step_anew(step, batch, examples, rank, ranks, seeded=True):
    drawn = random.Random(step) if seeded else random
    return drawn.sample(range(examples), batch)[rank::ranks]


RIGHT = {"25.1": 3.472, "25.2": newest, "25.3": share}
WRONG = {
    "25.1": [0.0347, 3.333, 1800, 2.22, "3"],
    "25.2": [partial(newest, by=str), partial(newest, unfinished=True), lambda folders: 10, 10],
    "25.3": [
        per_rank, each_step_anew, partial(share, again=False),
        partial(each_step_anew, seeded=False), 3,
    ],
}  # fmt: skip
