"""The layouts that lessons 13, 15 and 16 show, whose plans are kept: no reader waits for them."""

from __future__ import annotations

from collections.abc import Iterator

from helpers.parallel.layout import Parallel
from helpers.recipe import Recipe, replace
from helpers.strategy import plan_cache

BASE = Recipe("deberta", profile="full", precision="fp16", batch_size=64, length=256)
LARGE = Recipe("deberta-large", profile="full", precision="bf16", batch_size=16, length=256)


def everything() -> Iterator[tuple[Recipe, Parallel]]:
    """Each recipe with its layout."""
    data, shards = Parallel(data=4), Parallel(data=4, zero_stage=3)
    # 13 data parallel
    yield from ((replace(BASE, accumulation=4), Parallel(data=ranks)) for ranks in (1, 2))
    yield from ((BASE, Parallel(data=ranks)) for ranks in (1, 2, 4))
    few, eight = replace(BASE, batch_size=32), Parallel(data=8)
    yield from ((replace(few, accumulation=2), Parallel()), (few, eight))
    yield replace(few, batch_size=512, accumulation=16), eight
    # 15 pipelines
    job = replace(LARGE, batch_size=32)
    for micro_batches in (4, 16):
        for schedule in ("gpipe", "1f1b"):
            layout = Parallel(pipeline=4, schedule=schedule)
            yield replace(job, accumulation=micro_batches), layout
    in_parts = replace(job, accumulation=4)
    yield from ((job, shards), (in_parts, shards), (in_parts, data))
    # 16 tensor parallel
    yield from ((LARGE, Parallel(data=4, zero_stage=stage)) for stage in (0, 2, 3))
    tensor = Parallel(tensor=4)
    yield from ((LARGE, Parallel()), (LARGE, tensor), (replace(LARGE, accumulation=4), tensor))
    more = replace(LARGE, batch_size=64)
    yield from ((more, Parallel(data=4, zero_stage=2)), (more, tensor))


def plan_everything() -> None:
    """Plan all of it, some minutes where nothing is kept."""
    for recipe, layout in everything():
        plan_cache.planned(recipe, layout)
