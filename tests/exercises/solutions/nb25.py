"""Answers to the exercises of notebook 25, right and wrong."""

import random


def number(name):
    return int(name.removeprefix("step-"))


def newest(folders):
    return max((number(name) for name, files in folders.items() if ".metadata" in files), default=0)


def last_by_name(folders):
    whole = [name for name, files in folders.items() if ".metadata" in files]
    return number(max(whole, default="step-0"))


def newest_of_all(folders):
    return max(map(number, folders), default=0)


def share(step, batch, examples, rank, ranks):
    epoch, place = divmod(step, examples // batch)
    order = list(range(examples))
    random.Random(epoch).shuffle(order)
    return order[place * batch : (place + 1) * batch][rank::ranks]


def per_rank(step, batch, examples, rank, ranks):
    """As a sampler that deals the examples of an epoch out to the ranks first."""
    order = list(range(examples))
    random.Random(step * batch // examples).shuffle(order)
    mine = order[rank::ranks]
    first = step * (batch // ranks) % len(mine)
    return mine[first : first + batch // ranks]


def each_step_anew(step, batch, examples, rank, ranks):
    return random.Random(step).sample(range(examples), batch)[rank::ranks]


def never_shuffled_again(step, batch, examples, rank, ranks):
    place = step % (examples // batch)
    return list(range(examples))[place * batch : (place + 1) * batch][rank::ranks]


def unseeded(step, batch, examples, rank, ranks):
    return random.sample(range(examples), batch)[rank::ranks]


RIGHT = {"25.1": 3.472, "25.2": newest, "25.3": share}
WRONG = {
    "25.1": [0.0347, 3.333, 1800, 2.22, "3"],
    "25.2": [last_by_name, newest_of_all, lambda folders: 10, 10],
    "25.3": [per_rank, each_step_anew, never_shuffled_again, unseeded, 3],
}
