"""Answers to the exercises of notebook 05, right and wrong."""

import math

import torch
import torch.nn.functional as F

from tests.exercises import mistakes


def state_bytes(shapes):
    counts = [math.prod(shape) for shape in shapes]
    return sum(8 * n if n < 4096 else 2 * (n + 4 * math.ceil(n / 256)) for n in counts)


def bytes_of(small=lambda n: 8 * n, large=lambda n: 2 * n + 8 * math.ceil(n / 256), limit=4096):
    return lambda shapes: sum(small(n) if n < limit else large(n) for n in map(math.prod, shapes))


def quantize_up(v, levels, block=256, wrong=""):
    """`wrong` is the mistake that it makes."""
    rows = F.pad(v.flatten(), (0, -v.numel() % block)).view(-1, block)
    scale = rows.amax(1)
    between = (levels[:-1] + levels[1:]) / 2 if wrong == "nearest" else levels
    places = torch.bucketize(rows / scale[:, None].clamp(min=1e-38), between)
    places = (places + 2 * (wrong == "one more")).clamp(max=255).flatten()[: v.numel()]
    if wrong != "int64 places":
        places = places.to(torch.uint8)
    if wrong == "zeros have a scale":
        scale = scale + (scale == 0)
    return places if wrong == "flat" else places.view_as(v), scale


RIGHT = {
    "05.1": state_bytes,
    "05.2": quantize_up,
    "05.4": {"vit.layers.3.mlp.fc1.weight"},
    "05.3": {"B", "D"},
}
WRONG = {
    "05.1": [
        bytes_of(limit=0), bytes_of(limit=4097), bytes_of(large=lambda n: 2 * n),
        bytes_of(large=lambda n: 2 * n + 8 * (n // 256)),
        bytes_of(large=lambda n: n + 4 * math.ceil(n / 256)), bytes_of(small=lambda n: 4 * n),
        bytes_of(large=lambda n: 8 * n), 4096,
    ],
    "05.2": [
        *mistakes(quantize_up, "nearest", "one more", "int64 places", "flat", "zeros have a scale"),
        lambda v, codes, block=256: v, 3,
    ],
    "05.4": [
        set(), {"vit.embeddings.cls_token"}, {"vit.layers.3.attention.o_proj.weight"},
        {"vit.embeddings.position_embeddings"},
        {"vit.layers.3.mlp.fc1.weight", "vit.embeddings.patch_embeddings.projection.weight"},
        {"fc1"}, 67,
    ],
    "05.3": [{"B"}, {"A", "B"}, {"B", "C"}, {"A", "B", "C", "D"}, {"D"}, set("AC"), {"E"}, 2],
}  # fmt: skip
