"""Run by test_split.py as ranks: the course's models split by DTensor, against the whole models."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from by_hand import frameworks
from helpers import models
from helpers.parallel.tensor_dtensor import Collectives, gather, regroup, split
from helpers.recipe import Recipe
from tests.small import without_dropout
from tight_fit.layouts.clipping import clip_
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import loss_sum

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
generator = torch.Generator().manual_seed(1)


def batch(recipe):
    labels = torch.arange(4)
    if recipe.task == "image":
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "labels": labels}
    mask = (
        torch.arange(17) < torch.tensor([17, 9, 17, 3])[:, None]
    ).long()  # 17 tokens: uneven slices
    return {
        "input_ids": torch.randint(5, 8000, (4, 17), generator=generator),
        "attention_mask": mask,
        "labels": labels,
    }


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(recipe, ways):
    """One step of the split and of the whole model: what is off, and what was sent."""
    dense, cut = (without_dropout(models.build(recipe)) for _ in range(2))
    assert split(cut, mesh, **ways) is cut
    rows = [batch(recipe) for _ in range(recipe.accumulation)]
    inputs = {name: value for name, value in rows[0].items() if name != "labels"}
    with torch.no_grad():
        measured = {"logits": (dense(**inputs).logits - cut(**inputs).logits).abs().max().item()}
    optimizers = [make_optimizer(dense, recipe), regroup(make_optimizer(cut, recipe))]
    for each in rows:
        loss_sum(dense, each, recipe).backward()
    with Collectives() as seen:
        for each in rows:
            loss_sum(cut, each, recipe).backward()
    truth, ours = (
        {name: p.grad for name, p in dense.named_parameters() if p.grad is not None},
        gather(cut),
    )
    scale = max(gradient.norm() for gradient in truth.values())
    measured["missing"] = sorted(truth.keys() ^ ours.keys())
    measured["gradients"] = max(
        ((ours[name] - gradient).norm() / scale).item() for name, gradient in truth.items()
    )
    measured["placed"] = all(
        p.grad.placements == p.placements for p in cut.parameters() if isinstance(p, DTensor)
    )
    measured["bytes"] = all(
        p.grad.to_local().untyped_storage().nbytes() == p.to_local().nbytes
        for p in cut.parameters()
        if isinstance(p, DTensor)
    )
    norms = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5), clip_(cut.parameters(), 0.5)
    measured["norm"] = (norms[1] / norms[0] - 1).abs().item()
    for optimizer in optimizers:
        frameworks.set_learning_rate(optimizer, recipe, 0)
        optimizer.step()
    measured["weights"] = max(
        (whole(ours) - truth).abs().max().item()
        for ours, truth in zip(cut.parameters(), dense.parameters())
    )
    return measured | {
        "forward": seen.counts("forward"),
        "backward": seen.counts("backward"),
        "layers": recipe.layers,
    }


def masks(ways):
    """DeBERTa with dropout: alike outside the pairs, other masks inside, a common state after."""
    recipe = Recipe("deberta", profile="mini", batch_size=4)
    torch.manual_seed(0)
    model = split(models.build(recipe), mesh, **ways)
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and name.startswith("deberta.encoder.layer.0."):
            module.register_forward_hook(
                lambda module, inputs, output, name=name: seen.append(
                    (
                        name,
                        (output.to_local() if isinstance(output, DTensor) else output)
                        .eq(0)
                        .double()
                        .mean()
                        .item(),
                        (output.to_local() if isinstance(output, DTensor) else output)
                        .eq(0)
                        .long()
                        .flatten()[:999]
                        .sum()
                        .item(),
                    )
                )
            )
    torch.manual_seed(5)
    with Collectives() as counted:
        loss = loss_sum(model, batch(recipe), recipe)
        loss.backward()
    sums = [
        gather(model)[f"deberta.encoder.{name}.weight"].double().sum().item()
        for name in ("rel_embeddings", "LayerNorm")
    ]
    return {
        "seen": seen,
        "loss": loss.item(),
        "next": torch.rand(1).item(),
        "sums": sums,
        "backward": counted.counts("backward"),
    }


measured = {"masks": {str(ways): masks(ways) for ways in ({}, {"sequence": True})}}
for model, optimizer, accumulation, ways in json.loads(sys.argv[1]):
    recipe = Recipe(
        model,
        profile="mini",
        batch_size=4 * accumulation,
        accumulation=accumulation,
        optimizer=optimizer,
    )
    measured[f"{model} {optimizer} {accumulation} {sorted(ways)}"] = compare(recipe, ways)
print(json.dumps(measured))
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads now and then abort while Python is taken down
