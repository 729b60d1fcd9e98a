"""Answers to the exercises of notebook 08, right and wrong."""

import math

from helpers.plan import plan
from helpers.recipe import Recipe


def workers(make, step, share):
    if make <= share * (make + step):
        return 0
    return max(1, math.ceil((1 - share) * make / step))


def never_none(make, step, share):
    return max(1, math.ceil((1 - share) * make / step))


def at_no_share(make, step, share):
    return 0 if make <= share * (make + step) else math.ceil(make / step)


def rounded_down(make, step, share):
    return 0 if make <= share * (make + step) else max(1, int((1 - share) * make / step))


def align(word_ids, labels):
    last, out = None, []
    for word in word_ids:
        out.append(labels[word] if word is not None and word != last else -100)
        last = word
    return out


def every_piece(word_ids, labels):
    return [-100 if word is None else labels[word] for word in word_ids]


def drops_special(word_ids, labels):
    return [label for label, word in zip(align(word_ids, labels), word_ids) if word is not None]


def zero_for_special(word_ids, labels):
    return [0 if label == -100 else label for label in align(word_ids, labels)]


def in_order(word_ids, labels):
    rest = iter([*labels, *[-100] * len(word_ids)])
    return [next(rest) for _ in word_ids]


STEP = (
    sum(plan(Recipe("deberta", profile="full", batch_size=16, length=256)).flops.values()) / 400e12
)

RIGHT = {"08.4": 200, "08.3": workers, "08.1": 16 * 256 / STEP, "08.2": align}
WRONG = {
    "08.4": [2**19, 320, 210, 185, 200.5, True],
    "08.3": [never_none, at_no_share, rounded_down, 7],
    "08.1": [16 * 256 / STEP * 3, STEP, 16 / STEP, -1.0, "fast"],
    "08.2": [every_piece, drops_special, zero_for_special, in_order, [0]],
}
