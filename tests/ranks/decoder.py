"""Run by test_decoder_cuts.py: lesson 16's cuts of a decoder, against the whole on one process."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tight_fit.layouts.messages import CommMeter

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=True)),
}
MOST, RATE, STEPS, ROWS, TOKENS = 0.1, 1e-2, 2, 3, 64


def made(name):
    """The same on every rank; norms that differ from 1, so that a lost factor shows."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def examples():
    return torch.randint(64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def apart(found, wanted):
    """{name: the norm of the difference, as a share of what is wanted}."""
    return {
        name: float((tensor - wanted[name]).norm() / wanted[name].norm())
        for name, tensor in found.items()
    }


def first_gradients(model, ids):
    with loss_parallel():
        model(input_ids=ids, labels=ids).loss.backward()
    return {name: whole(p.grad).clone() for name, p in model.named_parameters()}


def trained(model, how):
    """Gradients of the first step, its norm before clipping, bytes sent, weights after STEPS."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, **{how: True})
    ids = examples()
    norms, first, sent = [], {}, []
    for _ in range(STEPS):
        with CommMeter() as there, loss_parallel():
            model(input_ids=ids, labels=ids).loss.backward()
        first = first or {n: whole(p.grad).clone() for n, p in model.named_parameters()}
        with CommMeter() as after:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
            optimizer.step()
        sent.append(sum(message.bytes for message in [*there.sent, *after.sent]))
        norms.append(float(whole(norm)))
        optimizer.zero_grad()
    weights = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    return first, norms, sent[0], weights


def main(cells, leave_out, how):
    dist.init_process_group("gloo")
    lesson = {}
    exec(cells, lesson)
    cuts = lesson["cuts"].items()
    lesson["cuts"] = {name: cut for name, cut in cuts if not leave_out or leave_out not in name}
    told = {}
    for name in MODELS:
        model = made(name)
        lesson["cut_decoder"](model, init_device_mesh("cpu", (dist.get_world_size(),)))
        if leave_out:  # clipping and fused steps refuse plain tensors among DTensors
            pair = [first_gradients(one, examples()) for one in (model, made(name))]
            told[name] = {"gradients": apart(*pair)}
            continue
        wanted, found = trained(made(name), how), trained(model, how)
        told[name] = {
            "whole": sum(not isinstance(p, DTensor) for p in model.parameters()),
            "gradients": apart(found[0], wanted[0]),
            "norms": [found[1], wanted[1]],
            "sent": found[2],
            "weights": apart(found[3], wanted[3]),
        }
    print(f"RESULT {json.dumps(told)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
