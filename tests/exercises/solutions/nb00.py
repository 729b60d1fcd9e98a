"""Answers to the exercises of notebook 00, right and wrong."""

KEPT = 4 * 16 * 12 * 8 * 512 * 768 / 2**30  # RoBERTa-base's activations by hand, GiB


def count_bytes(model):
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    return {
        "parameters": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": gradients,
        "optimizer states": 2 * gradients + 4 * len(trained),
    }


def always_fp32(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    n = sum(p.numel() for p in trained)
    return {
        "parameters": 4 * sum(p.numel() for p in model.parameters()),
        "gradients": 4 * n,
        "optimizer states": 8 * n + 4 * len(trained),
    }


def frozen_too(model):
    count = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "parameters": count,
        "gradients": count,
        "optimizer states": 2 * count + 4 * len(list(model.parameters())),
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
    "00.3": [always_fp32, frozen_too, lambda model: 0, 16],
    "00.4": [
        ("activations", "backward"), ("optimizer states", "backward"), "optimizer states",
        ("weights", "optimizer"),
    ],
}  # fmt: skip
