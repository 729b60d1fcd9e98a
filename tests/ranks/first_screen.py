"""Run by test_decoder_cuts.py: a step of what lesson 16's first screen makes, against the whole."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

text, folder = sys.argv[1:]
ids = torch.randint(64, (3, 8), generator=torch.Generator().manual_seed(1))
page = {"batches": [ids]}
exec(text, page)


def weights(model):
    named = model.named_parameters()
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for n, p in named}


one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
before = weights(one)
optimizer = torch.optim.AdamW(one.parameters(), lr=page["optimizer"].param_groups[0]["lr"])
one(input_ids=ids, labels=ids).loss.backward()
torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
optimizer.step()
wanted, found = weights(one), weights(page["model"])
told = {
    "apart": max(float((found[name] - wanted[name]).abs().max()) for name in wanted),
    "moved": min(float((before[name] - wanted[name]).abs().max()) for name in wanted),
}
print(f"RESULT {json.dumps(told)}")
dist.barrier()
dist.destroy_process_group()
