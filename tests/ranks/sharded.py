"""Run by test_sharding.py: what lesson 14's `shard` sends and keeps, for a tiny Qwen3, and its loop
that accumulates and clips beside a whole model.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.ranks.tiny import end, furthest, qwen3
from tight_fit.layouts.messages import CommMeter

lesson = {"torch": torch}
exec(sys.argv[1], lesson)
dist.init_process_group("gloo")
ranks = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
told = {}
ids = torch.arange(18).view(2, 9)
for tied in (True, False):
    for stage in (2, 3):
        model = qwen3(tied)
        count = sum(p.numel() for p in model.parameters())
        first = torch.nn.ModuleList([model.model.layers[-1], model.model.embed_tokens])
        once = sum(p.numel() for p in {*first.parameters(), *model.lm_head.parameters()}) / count
        lesson["shard"](model, mesh=mesh, reshard_after_forward=stage == 3)
        with CommMeter() as meter:
            model(input_ids=ids, labels=ids).loss.backward()
        kept = {str(one.dtype) for p in model.parameters() for one in (p, p.grad)}
        sent = sum(message.bytes for message in meter.sent) / (count * (ranks - 1) / ranks)
        told[f"{tied} {stage}"] = {"sent": sent, "once": once, "kept": sorted(kept)}

model, whole = qwen3(), qwen3()
lesson["shard"](model, mesh=mesh, mp_policy=MixedPrecisionPolicy())  # fp32: no rounding
optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, whole)]
texts = torch.randint(64, (4 * ranks, 1, 20), generator=torch.Generator().manual_seed(0))
lesson |= {"model": model, "optimizer": optimizers[0]}
loop = sys.argv[2]
for old, new in (("torch.arange(100, 180).view(4, 1, 20)", "mine"), ("(), 1.0)", "(), 0.1)")):
    assert loop.count(old) == 1
    loop = loop.replace(old, new)
exec(loop, lesson | {"mine": texts.chunk(ranks)[dist.get_rank()]})
for text in texts:
    (whole(input_ids=text, labels=text).loss / len(texts)).backward()
norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
optimizers[1].step()
pairs = zip(model.parameters(), whole.parameters())
told["loop"] = {"norm": norm.item(), "apart": furthest(pairs)}

model = qwen3()
try:  # embeddings that are tied to the head, in a group of their own
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(input_ids=ids)
except ValueError as error:
    told["alone"] = str(error)
end(told)
