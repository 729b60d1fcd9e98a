"""Run by test_decoder_cuts.py: a step of what lesson 16's first screen makes, against the whole."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

text, folder = sys.argv[1:]
page = {}
exec(text, page)


def trained(model, optimizer):
    ids = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    weights = {}
    for name, parameter in model.named_parameters():
        whole = isinstance(parameter, DTensor)
        weights[name] = (parameter.full_tensor() if whole else parameter).detach()
    return weights


one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
before = {name: parameter.detach().clone() for name, parameter in one.named_parameters()}
group = page["optimizer"].param_groups[0]
wanted = trained(one, torch.optim.AdamW(one.parameters(), lr=group["lr"]))
found = trained(page["model"], page["optimizer"])
told = {
    "apart": max(float((found[name] - wanted[name]).abs().max()) for name in wanted),
    "moved": min(float((before[name] - wanted[name]).abs().max()) for name in wanted),
    "cut": len(page["cut"]),
    "whole": len(page["whole"]),
}
print(f"RESULT {json.dumps(told)}")
dist.barrier()
dist.destroy_process_group()
