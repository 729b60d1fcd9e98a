"""Run by test_pipeline.py as ranks: a model in stages, by hand and by torch's own engine."""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from by_hand.pipeline import run
from by_hand.pipeline_stage import cut
from by_hand.transport import PipelineTransport
from helpers import models, train
from helpers.recipe import Recipe
from tests.ranks.tiny import difference
from tests.small import without_dropout
from tight_fit.layouts.schedules import gpipe, interleaved, one_f_one_b
from tight_fit.techniques.step import loss_sum

ROWS, MICRO = 8, 4


def apart(stages, truth):
    named = [pair for stage in stages for pair in stage.named_parameters()]
    ours = torch.cat([value.grad.flatten() for _, value in named])
    return difference(ours, torch.cat([truth[name].flatten() for name, _ in named]))


dist.init_process_group("gloo")
transport, errors = PipelineTransport(), {}
for name in ("vit", "deberta"):
    recipe = Recipe(name, batch_size=ROWS)
    model = without_dropout(models.build(recipe))
    batch = train.encoded(recipe)["train"].batch(range(ROWS))
    loss = loss_sum(model, batch, recipe) / ROWS
    loss.backward()
    truth = {key: value.grad.clone() for key, value in model.named_parameters()}
    split = zip(*(value.tensor_split(MICRO) for value in batch.values()))
    micro_batches = [dict(zip(batch, parts)) for parts in split]
    for make in (gpipe, one_f_one_b, interleaved):
        schedule = make(transport.ranks, MICRO)
        model.zero_grad()
        mine = cut(model, schedule.stages)[transport.rank :: transport.ranks]
        step = run(schedule, mine, transport, micro_batches)
        errors[f"{name} {schedule.name}"] = [
            apart(mine, truth),
            abs(sum(step.losses) - loss).item() if step.losses else 0.0,
        ]
    if name == "vit":
        model.zero_grad()
        stage = cut(model, transport.ranks)[transport.rank]
        engine = Schedule1F1B(
            PipelineStage(stage, transport.rank, transport.ranks, torch.device("cpu")),
            MICRO,
            scale_grads=False,
            loss_fn=lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum") / ROWS,
        )
        losses: list = []
        if stage.last:
            engine.step(target=batch["labels"], losses=losses)
        else:
            engine.step(batch["pixel_values"])
        errors["vit torch"] = [
            apart([stage], truth),
            abs(sum(losses) - loss).item() if losses else 0.0,
        ]
print(json.dumps(errors))
dist.barrier()
