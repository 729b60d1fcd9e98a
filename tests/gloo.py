"""torch's own process group among threads of one process: a reference for any number of ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist


def among_threads(ranks: int, work: Callable[[dist.ProcessGroupGloo, int], object]) -> list:
    """What `work(group, rank)` returned on each rank."""
    store = dist.HashStore()

    def on_rank(rank: int):
        return work(
            dist.ProcessGroupGloo(
                dist.PrefixStore("ranks", store), rank, ranks, timedelta(seconds=30)
            ),
            rank,
        )

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(on_rank, range(ranks)))
