"""Answers to the exercises of notebook 00, right and wrong."""

from functools import partial

KEPT = 4 * 16 * 12 * 8 * 512 * 768 / 2**30  # RoBERTa-base's activations by hand, GiB


def count_bytes(model, wide=False, all_train=False):
    """`wide` takes every number for fp32, `all_train` what is frozen for trained."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad or all_train]

    def size(some):
        return sum(p.numel() * (4 if wide else p.element_size()) for p in some)

    return {
        "parameters": size(parameters),
        "gradients": size(trained),
        "optimizer states": 2 * size(trained) + 4 * len(trained),
    }


RIGHT = {
    "00.1": 110,
    "00.2": KEPT,
    "00.3": count_bytes,
    "00.4": ("optimizer states", "optimizer"),
}
WRONG = {
    "00.1": [109, 111, 0, 110.5, "many"],
    "00.2": [KEPT / 12, KEPT * 2**10, 1.15 * KEPT],
    "00.3": [
        partial(count_bytes, wide=True), partial(count_bytes, all_train=True), lambda model: 0, 16,
    ],
    "00.4": [
        ("activations", "backward"), ("optimizer states", "backward"), "optimizer states",
        ("weights", "optimizer"),
    ],
}  # fmt: skip
