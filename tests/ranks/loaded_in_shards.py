"""Run by test_sharding.py: what transformers loads on each rank, sharded or cut by itself, beside
the whole model, as lessons 14 and 16 name it.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DistributedConfig

folder = sys.argv[1]
dist.init_process_group("gloo")
ids = torch.arange(18).view(2, 9)
whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
whole(input_ids=ids, labels=ids).loss.backward()


def loaded(**asked):
    config = DistributedConfig(**asked)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=config
    )


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def held(model):
    """The share of the parameters that lies on this rank."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.numel() for p in own) / sum(p.numel() for p in whole.parameters())


model = loaded(fsdp_size=dist.get_world_size(), fsdp_mixed_precision=True)
same = all(torch.equal(full(p), q) for p, q in zip(model.parameters(), whole.parameters()))
policy = model.model.layers[0]._get_fsdp_state()._mp_policy
kinds = [str(policy.param_dtype), str(policy.reduce_dtype)]
told = {"sharded": {"same": same, "held": held(model), "kinds": kinds}}

model = loaded(tp_plan="auto")
model(input_ids=ids, labels=ids).loss.backward()
pairs = [(full(p.grad), q.grad) for p, q in zip(model.parameters(), whole.parameters())]
apart = max(float((a - b).norm() / b.norm()) for a, b in pairs)
told["cut"] = {"apart": apart, "held": held(model)}
try:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
except RuntimeError as error:
    told["cut"]["error"] = str(error)
print(f"RESULT {json.dumps(told)}")
dist.barrier()
dist.destroy_process_group()
