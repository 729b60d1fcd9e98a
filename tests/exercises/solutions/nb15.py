"""Answers to the exercises of notebook 15, right and wrong."""


def pairs(warm):
    def order(s, K, M):
        first = min(M, warm(s, K))
        todo = [("F", m) for m in range(first)]
        for m in range(M):
            todo += [("F", first + m)] if first + m < M else []
            todo.append(("B", m))
        return todo

    return order


right = pairs(lambda s, K: min(1, K - 1 - s))


def both_ways(s, K, M):
    """Waits for ever: the last stage wants its micro-batches in another order than they come."""
    order = list(range(M)) if s < K - 1 or K == 1 else list(range(M))[::-1]
    return [(kind, m) for m in order for kind in "FB"]


def copies(K, sizes):
    return sum((K - s) * size for s, size in enumerate(sizes))


def stuck(first, second):
    first, second = list(first), list(second)
    while first and second and first[0] != second[0]:
        first.pop(0), second.pop(0)
    return bool(first or second)


RIGHT = {"15.1": 63, "15.2": right, "15.4": copies, "15.3": stuck}
WRONG = {
    "15.1": [70, 64, 62, 72, 56, 7, 63.5, "63"],
    "15.2": [
        pairs(lambda s, K: K - 1 - s), pairs(lambda s, K: 0), pairs(lambda s, K: 2),
        lambda *given: right(*given)[:-1],  # forgets the last
        lambda *given: [right(*given)[-1], *right(*given)[:-1]],  # goes backward first
        both_ways, lambda s, K, M: 0, 3,
    ],
    "15.4": [
        lambda K, sizes: K * sum(sizes), lambda K, sizes: sum(sizes),
        lambda K, sizes: sum((K - 1 - s) * size for s, size in enumerate(sizes)),
        lambda K, sizes: sum((s + 1) * size for s, size in enumerate(sizes)), 3,
    ],
    "15.3": [
        lambda first, second: first == second, lambda first, second: len(first) != len(second),
        lambda first, second: any(a == b for a, b in zip(first, second)),
        lambda first, second: False, lambda first, second: True,
        lambda first, second: sorted(first) == sorted(second), 3,
    ],
}  # fmt: skip
