"""Answers to the exercises of notebook 20, right and wrong."""


def positions(lengths):
    return [place for length in lengths for place in range(length)]


def goes_on(lengths):
    return list(range(sum(lengths)))


def from_one(lengths):
    return [place + 1 for place in positions(lengths)]


def whose(lengths):
    return [text for text, length in enumerate(lengths) for _ in range(length)]


def packed_labels(texts):
    row = []
    for prompt, answer in texts:
        start = len(row)
        row += [-100] * len(prompt) + list(answer)
        row[start] = -100
    return row


def keeps_the_first(texts):
    return [label for prompt, answer in texts for label in [-100] * len(prompt) + list(answer)]


def learns_prompts(texts):
    return [label for prompt, answer in texts for label in [-100, *(prompt + answer)[1:]]]


def moved(texts):
    return [*packed_labels(texts)[1:], -100]


def with_zero(texts):
    return [0 if label == -100 else label for label in packed_labels(texts)]


RIGHT = {"20.1": 4 * 2048 * 128_256 * 4, "20.2": positions, "20.3": packed_labels}
WRONG = {
    "20.1": [4 * 2048 * 128_256, 4 * 2048 * 128_256 * 2, 2048 * 128_256 * 4, 3.9, "4 GB"],
    "20.2": [goes_on, from_one, whose, lambda lengths: lengths, 3],
    "20.3": [keeps_the_first, learns_prompts, moved, with_zero, lambda texts: [], 3],
}
