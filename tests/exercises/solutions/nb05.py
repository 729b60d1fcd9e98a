"""Answers to the exercises of notebook 05, right and wrong."""

import math

import torch
import torch.nn.functional as F


def state_bytes(shapes):
    counts = [math.prod(shape) for shape in shapes]
    return sum(8 * n if n < 4096 else 2 * (n + 4 * math.ceil(n / 256)) for n in counts)


def bytes_of(small=lambda n: 8 * n, large=lambda n: 2 * n + 8 * math.ceil(n / 256), limit=4096):
    return lambda shapes: sum(small(n) if n < limit else large(n) for n in map(math.prod, shapes))


def quantize_up(v, levels, block=256):
    rows = F.pad(v.flatten(), (0, -v.numel() % block)).view(-1, block)
    scale = rows.amax(1)
    share = torch.where(scale[:, None] > 0, rows / scale[:, None].clamp(min=1e-38), 0.0)
    places = torch.bucketize(share, levels).clamp(max=255)
    return places.to(torch.uint8).flatten()[: v.numel()].view_as(v), scale


def nearest(v, codes, block=256):
    rows = F.pad(v.flatten(), (0, -v.numel() % block)).view(-1, block)
    scale = rows.amax(1)
    places = torch.bucketize(rows / scale[:, None].clamp(min=1e-38), (codes[:-1] + codes[1:]) / 2)
    return places.to(torch.uint8).flatten()[: v.numel()].view_as(v), scale


def one_more(v, codes, block=256):
    places, scale = nearest(v, codes, block)
    return (places.int() + 2).clamp(max=255).to(torch.uint8), scale


def int64_places(v, codes, block=256):
    places, scale = quantize_up(v, codes, block)
    return places.long(), scale


def flat(v, codes, block=256):
    places, scale = quantize_up(v, codes, block)
    return places.flatten(), scale


def zero_is_trouble(v, codes, block=256):
    rows = F.pad(v.flatten(), (0, -v.numel() % block)).view(-1, block)
    scale = rows.amax(1)
    places = torch.bucketize(rows / scale[:, None], codes, right=True)
    return places.to(torch.uint8).flatten()[: v.numel()].view_as(v), scale.nan_to_num(1) + (
        scale == 0
    )


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
        nearest, one_more, int64_places, flat, zero_is_trouble,
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
