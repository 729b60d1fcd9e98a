"""Answers to the exercises of notebook 08, right and wrong."""

import math

from helpers.plan import plan
from helpers.recipe import Recipe


def workers(make, step, share):
    if make <= share * (make + step):
        return 0
    return max(1, math.ceil((1 - share) * make / step))


def align(word_ids, labels):
    last, out = None, []
    for word in word_ids:
        out.append(labels[word] if word is not None and word != last else -100)
        last = word
    return out


def in_order(word_ids, labels):
    rest = iter([*labels, *[-100] * len(word_ids)])
    return [next(rest) for _ in word_ids]


STEP = (
    sum(plan(Recipe("deberta", profile="full", batch_size=16, length=256)).flops.values()) / 400e12
)

RIGHT = {"08.4": 200, "08.3": workers, "08.1": 16 * 256 / STEP, "08.2": align}
WRONG = {
    "08.4": [2**19, 320, 210, 185, 200.5, True],
    "08.3": [
        lambda make, step, share: max(1, math.ceil((1 - share) * make / step)),
        lambda make, step, share: workers(make, step, 0) if workers(make, step, share) else 0,
        lambda make, step, share: min(workers(make, step, share), int((1 - share) * make / step)),
        7,
    ],
    "08.1": [16 * 256 / STEP * 3, STEP, 16 / STEP, -1.0, "fast"],
    "08.2": [
        lambda word_ids, labels: [-100 if word is None else labels[word] for word in word_ids],
        lambda word_ids, labels: align([word for word in word_ids if word is not None], labels),
        lambda word_ids, labels: [max(0, label) for label in align(word_ids, labels)],
        in_order, [0],
    ],
}  # fmt: skip
