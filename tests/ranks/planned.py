"""Run by test_plan_ranks.py as ranks: a rank trains a few steps and is then traced."""

import json
import sys
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from helpers import models, train
from helpers.parallel.layout import Parallel
from helpers.parallel.rank import Rank, grid
from helpers.recipe import Recipe
from helpers.strategy.plan_ranks import trace_rank
from tests.small import without_dropout
from tight_fit.memory.plan import to_plan
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import train_step

STEPS = 2


def cases(text: str) -> list[tuple[Recipe, Parallel]]:
    return [
        (Recipe.from_dict(recipe), Parallel(**parallel)) for recipe, parallel in json.loads(text)
    ]


def micro_batches(recipe: Recipe, step: int, data, share: slice | None = None):
    for rows in train.rows_of_step(recipe, len(data), step):
        yield data.batch(rows[share] if share else rows, "cpu")


@cache
def reference(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The weights of the single process. Cached: the cases have more layouts than recipes."""
    data = train.encoded(recipe)["train"]
    model = without_dropout(models.build(recipe))
    optimizer, scaler = make_optimizer(model, recipe), make_scaler(recipe, "cpu")
    for step in range(STEPS):
        train_step(
            model,
            optimizer,
            micro_batches(recipe, step, data),
            recipe.batch_size,
            recipe,
            scaler=scaler,
        )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def run(recipe: Recipe, parallel: Parallel) -> dict:
    data = train.encoded(recipe)["train"]
    rank = Rank(recipe, parallel, without_dropout(models.build(recipe)), grid(parallel))
    mine, size = rank.mesh["data"].get_local_rank(), rank.local.micro_batch
    share = slice(mine * size, (mine + 1) * size)
    for step in range(STEPS):
        rank.step(micro_batches(recipe, step, data, share))
    expected = reference(recipe)
    distance = 0.0
    for name, parameter in rank.module.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        distance = max(distance, (value - expected[name]).abs().max().item())
    del rank
    rank = Rank(recipe, parallel, models.build(recipe), grid(parallel))
    rows = list(range(size))
    storage_trace, sent = trace_rank(rank, lambda: data.batch(rows, "cpu"))
    followed = to_plan((storage_trace, 0), recipe, "cpu")
    sent_bytes: dict[str, int] = {}
    for message in sent:
        sent_bytes[message.kind] = sent_bytes.get(message.kind, 0) + message.bytes
    return {
        "distance": distance,
        "peak": followed.peak,
        "at_peak": followed.at_peak,
        "flops": followed.flops,
        "wire": sent_bytes,
        "messages": len(sent),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    for number, case in enumerate(cases(sys.argv[1])):
        print(
            "RESULT " + json.dumps({"case": number, "rank": dist.get_rank()} | run(*case)),
            flush=True,
        )
    dist.destroy_process_group()
