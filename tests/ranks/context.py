"""Run by test_scripts.py: attention of a text cut over ranks, against all of it on one."""

import json
import runpy
import sys
from contextlib import nullcontext

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
for name in ("ring", "ulysses") if key_heads % ranks == 0 else ("ring",):
    places = [cut["positions"](r, ranks, tokens, name == "ring") for r in range(ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(tokens))
    mine = [part.detach()[:, :, places[rank]].requires_grad_() for part in whole]
    cut["SENT"]["keys and values"] = 0
    meter = CommMeter()
    with meter if name == "ring" else nullcontext():  # it counts what one rank sends to another
        output = cut["ring"](*mine, places) if name == "ring" else cut["ulysses"](*mine, places)
        gradients = torch.autograd.grad(output.pow(3).sum(), mine)
    pairs = zip([output, *gradients], wanted)
    found[name] = {
        "apart": [float((part - full[:, :, places[rank]]).abs().max()) for part, full in pairs],
        "sent": cut["SENT"]["keys and values"],
        "metered": sum(message.bytes for message in meter.sent),
    }
print(json.dumps(found))
dist.destroy_process_group()
