"""Run by test_decoder_cuts.py: lesson 16's cuts of a decoder, against the whole on one process."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from transformers import LlamaConfig, LlamaForCausalLM

from tests.ranks.tiny import HEADS, SIZES, difference, end, qwen3, whole
from tight_fit.layouts.messages import CommMeter

MODELS = {"llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), "qwen3": qwen3}
MOST, RATE, STEPS, ROWS, TOKENS = 0.1, 1e-2, 2, 3, 64


def made(name):
    """The same on every rank; norms that differ from 1, so that a lost factor shows."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def backward(model):
    ids = torch.randint(64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    with loss_parallel():
        model(input_ids=ids, labels=ids).loss.backward()


def gradients(model):
    """Those that a backward pass left, whole."""
    return {name: whole(p.grad).clone() for name, p in model.named_parameters()}


def apart(found, wanted):
    return {name: difference(tensor, wanted[name]) for name, tensor in found.items()}


def trained(model, how):
    """Gradients of the first step, its norm before clipping, bytes sent, weights after STEPS."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, **{how: True})
    norms, first, sent = [], {}, []
    for _ in range(STEPS):
        with CommMeter() as there:
            backward(model)
        first = first or gradients(model)
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
        model, plain = made(name), made(name)
        lesson["cut_decoder"](model, init_device_mesh("cpu", (dist.get_world_size(),)))
        if leave_out:  # clipping and fused steps refuse plain tensors among DTensors
            backward(model)
            backward(plain)
            told[name] = {"gradients": apart(gradients(model), gradients(plain))}
            continue
        wanted, found = trained(plain, how), trained(model, how)
        told[name] = {
            "whole": sum(not isinstance(p, DTensor) for p in model.parameters()),
            "gradients": apart(found[0], wanted[0]), "norms": [found[1], wanted[1]],
            "sent": found[2], "weights": apart(found[3], wanted[3]),
        }  # fmt: skip
    end(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
