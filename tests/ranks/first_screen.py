"""Run by test_decoder_cuts.py: a step of what lesson 16's first screen makes, against the whole."""

import sys

import torch
from transformers import AutoModelForCausalLM

from tests.ranks.tiny import end, furthest, whole

text, folder = sys.argv[1:]
ids = torch.randint(64, (3, 8), generator=torch.Generator().manual_seed(1))
page = {"batches": [ids]}
exec(text, page)


def weights(model):
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


one = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
before = weights(one)
optimizer = torch.optim.AdamW(one.parameters(), lr=page["optimizer"].param_groups[0]["lr"])
one(input_ids=ids, labels=ids).loss.backward()
torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
optimizer.step()
wanted, found = weights(one), weights(page["model"])
moved = min(furthest([(before[name], wanted[name])]) for name in wanted)
end({"apart": furthest((found[name], wanted[name]) for name in wanted), "moved": moved})
