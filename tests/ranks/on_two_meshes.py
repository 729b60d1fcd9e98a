"""Run by test_decoder_cuts.py: lesson 16's cuts beside FSDP on four ranks, clipped and saved."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from transformers import Qwen3Config, Qwen3ForCausalLM

lesson = {"torch": torch}
exec(sys.argv[1], lesson)
dist.init_process_group("gloo")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
ids = torch.arange(16).view(2, 8)


def made():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=True))


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
whole, model = made(), made()
lesson["cut_decoder"](model, mesh["tensor"])
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
for one in (whole, model):
    with loss_parallel():
        one(input_ids=ids, labels=ids).loss.backward()
told = {"meshes": len({parameter.device_mesh for parameter in model.parameters()})}
clip = torch.nn.utils.clip_grad_norm_
told["norms"] = [float(clip(model.parameters(), 0.1).full_tensor())]
told["norms"].append(float(clip(whole.parameters(), 0.1)))
pairs = zip(model.parameters(), whole.parameters())
apart = [(a.grad.full_tensor() - b.grad).norm() / b.grad.norm() for a, b in pairs]
told["clipped"] = max(apart).item()
options = StateDictOptions(full_state_dict=True)
saved, full = get_model_state_dict(model, options=options), whole.state_dict()
told["saved"] = {k: torch.equal(saved[k], full[k]) for k in full}
print(f"RESULT {json.dumps(told)}")
dist.barrier()
dist.destroy_process_group()
