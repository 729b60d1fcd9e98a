"""Run by tests/by_hand/test_tensor.py as ranks: layers cut by hand, over both kinds of exchange."""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTLayer

from by_hand.exchange import Group, Ring
from by_hand.tensor import (
    ColumnParallelLinear,
    Layer,
    VocabParallelEmbedding,
    cut,
    f,
    join,
    vocabulary_cross_entropy,
)
from by_hand.transport import ProcessGroupTransport

dist.init_process_group("gloo")
torch.manual_seed(0)
dense = ViTLayer(ViTConfig(hidden_size=12, num_attention_heads=3, intermediate_size=10))
embedding, head = torch.nn.Embedding(31, 12), torch.nn.Linear(12, 31)
ids = torch.randint(0, 31, (2, 7))
loss = F.cross_entropy(head(dense(embedding(ids))).flatten(0, 1), ids.roll(1).flatten())
loss.backward()
transport, errors = ProcessGroupTransport(), {}

for kind, exchange in (("ring", Ring(transport)), ("torch", Group())):
    for tokens in (None, 7):
        words = VocabParallelEmbedding(embedding, exchange)
        layer, out = Layer(dense, exchange, tokens=tokens), ColumnParallelLinear(head, exchange)
        x = words(ids)
        x = join(layer(cut(x, exchange)), exchange, 7) if tokens else layer(x)
        before = transport.bytes_sent
        mine = vocabulary_cross_entropy(out(f(x, exchange)), ids.roll(1), 31, exchange)
        if kind == "ring":
            errors["bytes"] = transport.bytes_sent - before
        mine.backward()
        begin, end = exchange.bounds(31)
        pairs = {
            "loss": (mine, loss),
            "words": (words.weight.grad, embedding.weight.grad[begin:end]),
            "head": (out.weight.grad, head.weight.grad[begin:end]),
            "norm": (layer.before.weight.grad, dense.layernorm_before.weight.grad),
        }
        errors |= {
            f"{kind} {tokens} {name}": (one - other).abs().max().item()
            for name, (one, other) in pairs.items()
        }
transport.finish()
errors["expected_bytes"] = 0
for length in (14, 28) if transport.ranks > 1 else ():
    sizes = [len(piece) for piece in torch.arange(length).tensor_split(transport.ranks)]
    kept = sizes[transport.rank] + sizes[(transport.rank + 1) % transport.ranks]
    errors["expected_bytes"] += 4 * (2 * length - kept)
print(json.dumps(errors))
dist.barrier()
