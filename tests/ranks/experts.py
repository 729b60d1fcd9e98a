"""Run by test_scripts.py: experts cut over ranks, against a loop over tokens on one."""

import json
import runpy
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

script, top_k, capacity = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
width, hidden, count, tokens = 4, 6, 8, 12
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
layer = runpy.run_path(script)["Experts"](width, hidden, count, top_k, capacity)
torch.manual_seed(1)
inputs = torch.randn(tokens, width, requires_grad=True)  # of all ranks

own = inputs.detach().chunk(ranks)[rank].requires_grad_()
output = layer(own)
(output.pow(3).sum() + layer.balance).backward()
dist.all_reduce(layer.router.weight.grad)

torch.manual_seed(0)  # the weights of all experts, drawn as the layer draws them
router = torch.nn.Linear(width, count, bias=False)
up = (torch.randn(count, width, hidden) / width**0.5).requires_grad_()
down = (torch.randn(count, hidden, width) / hidden**0.5).requires_grad_()
probabilities = router(inputs).softmax(-1)
seats = -(-capacity * (tokens // ranks) * top_k // count)
rows, times, dropped = [], torch.zeros(count), 0
for token in range(tokens):
    if token % (tokens // ranks) == 0:
        taken = [0] * count  # each rank has seats of its own at every expert
    chosen = probabilities[token].topk(top_k)
    row = torch.zeros(width)
    for weight, expert in zip(chosen.values / chosen.values.sum(), chosen.indices.tolist()):
        times[expert] += 1
        if taken[expert] < seats:
            row = row + weight * (gelu(inputs[token] @ up[expert]) @ down[expert])
        else:
            dropped += 1
        taken[expert] += 1
    rows.append(row)
balance = count * (times / times.sum() * probabilities.mean(0)).sum()
whole = torch.stack(rows)
(whole.pow(3).sum() + balance).backward()

total = torch.tensor([layer.balance.item(), layer.dropped])
dist.all_reduce(total)
pairs = {
    "output": (output, whole.chunk(ranks)[rank]),
    "input": (own.grad, inputs.grad.chunk(ranks)[rank]),
    "router": (layer.router.weight.grad, router.weight.grad),
    "up": (layer.up.grad, up.grad.chunk(ranks)[rank]),
    "down": (layer.down.grad, down.grad.chunk(ranks)[rank]),
    "balance": (total[0], balance),
}
apart = {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}
held, dropped = [layer.up.numel(), up.numel()], [int(total[1]), dropped]
print(json.dumps({"apart": apart, "dropped": dropped, "held": held}))
dist.destroy_process_group()
