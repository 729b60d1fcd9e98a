"""Run by test_sharding.py: what lesson 14's `shard` sends and keeps, for a tiny Qwen3, and its loop
that accumulates and clips beside a whole model.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from tight_fit.layouts.messages import CommMeter

lesson = {"torch": torch}
exec(sys.argv[1], lesson)
dist.init_process_group("gloo")
ranks = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def made(tied):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=tied))


told = {}
ids = torch.arange(18).view(2, 9)
for tied in (True, False):
    for stage in (2, 3):
        model = made(tied)
        count = sum(p.numel() for p in model.parameters())
        first = torch.nn.ModuleList([model.model.layers[-1], model.model.embed_tokens])
        once = sum(p.numel() for p in {*first.parameters(), *model.lm_head.parameters()}) / count
        each = count * (ranks - 1) / ranks
        lesson["shard"](model, mesh=mesh, reshard_after_forward=stage == 3)
        with CommMeter() as meter:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        kept = {str(p.dtype) for p in model.parameters()}
        kept |= {str(p.grad.dtype) for p in model.parameters()}
        sent = sum(message.bytes for message in meter.sent) / each
        told[f"{tied} {stage}"] = {"sent": sent, "once": once, "kept": sorted(kept)}
model, whole = made(tied=True), made(tied=True)
lesson["shard"](model, mesh=mesh, mp_policy=MixedPrecisionPolicy())  # fp32: no rounding
optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, whole)]
texts = torch.randint(64, (4 * ranks, 1, 20), generator=torch.Generator().manual_seed(0))
lesson |= {"model": model, "optimizer": optimizers[0]}
loop = sys.argv[2]
for old, new in (("torch.arange(100, 180).view(4, 1, 20)", "mine"), ("(), 1.0)", "(), 0.1)")):
    assert loop.count(old) == 1
    loop = loop.replace(old, new)
exec(loop, lesson | {"mine": texts.chunk(ranks)[dist.get_rank()]})
for ids in texts:
    (whole(input_ids=ids, labels=ids).loss / len(texts)).backward()
norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
optimizers[1].step()
right = dict(whole.named_parameters())
pairs = [(one.full_tensor(), right[name]) for name, one in model.named_parameters()]
apart = max(float((one - other).detach().abs().max()) for one, other in pairs)
told["loop"] = {"norm": norm.item(), "apart": apart}
model = made(tied=True)
try:  # embeddings that are tied to the head, in a group of their own
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(input_ids=ids)
except ValueError as error:
    told["alone"] = str(error)
print(f"RESULT {json.dumps(told)}")
dist.barrier()
dist.destroy_process_group()
