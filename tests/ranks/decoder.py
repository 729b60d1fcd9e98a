"""Run by test_decoder_cuts.py: lesson 16's cuts of a decoder, against the whole on one process."""

import json
import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

cell, script, leave_out, foreach = sys.argv[1:]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=True)),
}
MOST, RATE, STEPS = 0.1, 1e-2, 2


def made(name):
    """The same on every rank; norms that differ from 1, so that a lost factor shows."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def apart(found, wanted):
    """{name: the norm of the difference, as a share of what is wanted}."""
    return {
        name: float((whole(tensor).detach() - wanted[name]).norm() / wanted[name].norm())
        for name, tensor in found.items()
    }


def trained(model, groups, clip):
    """Gradients of the first step, its norm before clipping, and the weights after STEPS."""
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups], lr=RATE, foreach=bool(int(foreach))
    )
    ids = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(1))
    norms, first = [], {}
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        first = first or {n: whole(p.grad).clone() for n, p in model.named_parameters()}
        norms.append(float(clip(groups, MOST)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    return first, norms, weights


dist.init_process_group("gloo")
lesson = {}
exec(cell, lesson)
lesson["cuts"] = {
    name: cut for name, cut in lesson["cuts"].items() if not leave_out or leave_out not in name
}
clip = runpy.run_path(script)["clip"]
told = {}
for name in MODELS:
    one = made(name)
    wanted = trained(
        one,
        [list(one.parameters())],
        lambda groups, most: torch.nn.utils.clip_grad_norm_(groups[0], most),
    )
    model = made(name)
    lesson["cut_decoder"](model, init_device_mesh("cpu", (dist.get_world_size(),)))
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
    found = trained(model, [cut, rest], clip)
    told[name] = {
        "cut": len(cut),
        "gradients": apart(found[0], wanted[0]),
        "weights": apart(found[2], wanted[2]),
        "norms": [found[1], wanted[1]],
    }
print(f"RESULT {json.dumps(told)}")
dist.barrier()
dist.destroy_process_group()
