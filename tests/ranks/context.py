"""Run by test_context_script.py: attention of a text cut over ranks, against all of it on one."""

import json
import runpy
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tight_fit.layouts.messages import CommMeter

script, heads, key_heads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cut = runpy.run_path(script)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same on all ranks
tokens, width = 8 * ranks, 4
whole = [
    torch.randn(2, count, tokens, width, dtype=torch.float64, requires_grad=True)
    for count in (heads, key_heads, key_heads)
]
output = scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
wanted = [output, *torch.autograd.grad(output.pow(3).sum(), whole)]

found = {}
for name in ("ring", "ulysses"):
    if name == "ulysses" and key_heads % ranks:
        continue
    places = [cut["positions"](r, ranks, tokens, name == "ring") for r in range(ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(tokens))
    mine = [part.detach()[:, :, places[rank]].requires_grad_() for part in whole]
    cut["SENT"]["keys and values"] = 0
    meter = CommMeter()
    if name == "ring":  # the meter counts what is sent from one rank to another
        with meter:
            output = cut["ring"](*mine, places)
            gradients = torch.autograd.grad(output.pow(3).sum(), mine)
    else:
        output = cut["ulysses"](*mine, places)
        gradients = torch.autograd.grad(output.pow(3).sum(), mine)
    pairs = zip([output, *gradients], wanted)
    found[name] = {
        "apart": [float((part - full[:, :, places[rank]]).abs().max()) for part, full in pairs],
        "sent": cut["SENT"]["keys and values"],
        "metered": sum(message.bytes for message in meter.sent),
    }
print(json.dumps(found))
dist.destroy_process_group()
