"""Run by test_decoder_cuts.py: lesson 16's cuts beside FSDP on four ranks, clipped and saved."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from tests.ranks.tiny import difference, end, qwen3

lesson = {"torch": torch}
exec(sys.argv[1], lesson)
dist.init_process_group("gloo")
ids = torch.arange(16).view(2, 8)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
whole, model = qwen3(), qwen3()
lesson["cut_decoder"](model, mesh["tensor"])
for part in (*model.model.layers, model):
    fully_shard(part, mesh=mesh["data"])
for one in (whole, model):
    with loss_parallel():
        one(input_ids=ids, labels=ids).loss.backward()
told = {"meshes": len({parameter.device_mesh for parameter in model.parameters()})}
clip = torch.nn.utils.clip_grad_norm_
told["norms"] = [float(clip(model.parameters(), 0.1).full_tensor())]
told["norms"].append(float(clip(whole.parameters(), 0.1)))
pairs = zip(model.parameters(), whole.parameters())
told["clipped"] = max(difference(a.grad, b.grad) for a, b in pairs)
options = StateDictOptions(full_state_dict=True)
saved, full = get_model_state_dict(model, options=options), whole.state_dict()
told["saved"] = {k: torch.equal(saved[k], full[k]) for k in full}
end(told)
