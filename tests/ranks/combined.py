"""Run by test_combinations_page.py: techniques beside DDP and FSDP, a tiny Qwen3 on two ranks."""

import contextlib
import sys

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.ranks.tiny import end, qwen3, whole

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
ids = torch.arange(18).view(2, 9)
told = {}


def made():
    return qwen3(hidden_size=64, intermediate_size=128, head_dim=16)


def gradients(model):
    """{name: gradient} of a step on the same texts on all ranks, whole."""
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def shard(model):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def equal(found, wanted):
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return all(torch.allclose(found[n], wanted[n], rtol=1e-4, atol=1e-6) for n in wanted)


wanted = gradients(made())
graphs = []


def counted(graph, inputs):
    graphs.append(graph)
    return graph.forward


model = made()
model.gradient_checkpointing_enable({"use_reentrant": False})
for layer in model.model.layers:
    layer.compile(backend=counted)
told["checkpointing, compile, FSDP"] = equal(gradients(shard(model)), wanted)
told["graphs"] = len(graphs)

model = shard(made())
model.set_requires_gradient_sync(False)
gradients(model)  # the first of two micro-batches
model.set_requires_gradient_sync(True)
told["accumulation, FSDP"] = equal(gradients(model), {n: 2 * g for n, g in wanted.items()})

model = DistributedDataParallel(made())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for last in (False, True):
    with contextlib.nullcontext() if last else model.no_sync():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        scaler.scale(loss / 2).backward()
scaler.unscale_(optimizer)
found = {name: p.grad for name, p in model.module.named_parameters()}
told["accumulation, scaler, DDP"] = equal(found, wanted)

model = shard(made())
optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=1)
gradients(model)
try:
    optimizer.step()
except RuntimeError as error:
    told["8-bit AdamW, FSDP"] = str(error)

folder = sys.argv[1]
if dist.get_rank() == 0:
    made().save_pretrained(folder)
dist.barrier()
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
for name, loaded in {"LoRA": {}, "QLoRA": {"quantization_config": four}}.items():
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **loaded)
    torch.manual_seed(0)
    lora = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, lora)
    alone = gradients(model)
    assert len(alone) == 2 * 7 * 2  # A and B beside the seven matrices of two layers
    model.zero_grad()
    shard(model.get_base_model())
    told[f"{name}, FSDP"] = equal(gradients(model), alone)
    base = next(p for n, p in model.named_parameters() if "q_proj.base_layer" in n)
    told[f"{name}, part"] = base.to_local().numel() / base.numel()

# the page's own lines, beside adapters alone
model = made()
torch.manual_seed(1)
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
wanted = gradients(get_peft_model(model, lora))
names = {"model": made(), "torch": torch, "LoraConfig": LoraConfig}
names |= {
    "get_peft_model": get_peft_model,
    "fully_shard": lambda part: fully_shard(part, mesh=mesh),
}
torch.manual_seed(1)
exec(sys.argv[2].replace("compile()", "compile(backend='eager')"), names)
assert any(gradient.any() for gradient in wanted.values())
told["together"] = equal(gradients(names["model"]), wanted)
end(told)
