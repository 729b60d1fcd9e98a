"""Run by test_sharding.py: what transformers loads on each rank, sharded or cut by itself, beside
the whole model, as lessons 14 and 16 name it.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DistributedConfig

from tests.ranks.tiny import difference, end, whole

dist.init_process_group("gloo")
ids = torch.arange(18).view(2, 9)


def loaded(**asked):
    if asked:
        asked = {"distributed_config": DistributedConfig(**asked)}
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **asked)


def held(model):
    """The share of the parameters that lies on this rank."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.numel() for p in own) / sum(p.numel() for p in alone.parameters())


alone = loaded()
alone(input_ids=ids, labels=ids).loss.backward()
model = loaded(fsdp_size=dist.get_world_size(), fsdp_mixed_precision=True)
same = all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), alone.parameters()))
policy = model.model.layers[0]._get_fsdp_state()._mp_policy
kinds = [str(policy.param_dtype), str(policy.reduce_dtype)]
told = {"sharded": {"same": same, "held": held(model), "kinds": kinds}}

model = loaded(tp_plan="auto")
model(input_ids=ids, labels=ids).loss.backward()
pairs = zip(model.parameters(), alone.parameters())
told["cut"] = {"apart": max(difference(p.grad, q.grad) for p, q in pairs), "held": held(model)}
try:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
except RuntimeError as error:
    told["cut"]["error"] = str(error)
end(told)
