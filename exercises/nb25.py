"""Exercises of notebook 25: clusters."""

from __future__ import annotations

import math
import random

from exercises.check import exercise
from exercises.comparisons import agree, close
from tight_fit.checks import plain

SAVE, BETWEEN, LIMIT = 40, 20 * 3600, 3600  # seconds, of exercise 1


@exercise(
    "25.1",
    hints=[
        (
            "First the interval: the square root of 2 * save * time between failures, in seconds. "
            "How often does a job save then before its time is over?"
        ),
        (
            "Two losses add up: save / interval for saving, and half an interval for each failure, "
            "which is interval / (2 * time between failures)."
        ),
    ],
    why="Young's interval is 40 minutes; in a job of an hour, saving every 30 costs hardly more",
)
def _(answer):
    interval = min(math.sqrt(2 * SAVE * BETWEEN), LIMIT / 2)
    close(answer, 100 * (SAVE / interval + interval / (2 * BETWEEN)), rel=0.01, unit="percent")


@exercise(
    "25.2",
    hints=[
        "Compare numbers, not names: as texts, step-9 comes after step-10.",
        "A folder counts only if .metadata is among its files; there may be none that does.",
    ],
    why="A rank that dies while it saves leaves shards behind, and they look like a checkpoint.",
)
def _(answer):
    shards = ["__0_0.distcp", "__1_0.distcp"]
    whole = [".metadata", *shards]
    cases = [
        ({"step-5": whole, "step-10": whole},),
        ({"step-9": whole, "step-10": whole, "step-100": shards},),
        ({"step-20": shards},),
        ({},),
        ({"step-20": [".metadata.tmp", *shards], "step-15": whole},),
    ]
    agree(answer, _newest, cases, lambda rng: (_folders(rng, whole, shards),))


def _newest(folders: dict[str, list[str]]) -> int:
    return max(
        (int(name[5:]) for name, files in folders.items() if ".metadata" in files), default=0
    )


def _folders(rng: random.Random, whole: list[str], shards: list[str]) -> dict[str, list[str]]:
    steps = rng.sample(range(1, 2000), rng.randint(1, 8))
    return {f"step-{step}": rng.choice((whole, whole, shards)) for step in steps}


@exercise(
    "25.3",
    hints=[
        "Which examples belong to a step may depend on step, batch and examples, not on ranks.",
        (
            "Within an epoch no example comes twice: shuffle once per epoch, with the epoch as the "
            "seed, and take the step's piece of that order."
        ),
        "Only then take this rank's share of the step: every ranks-th, from rank on.",
    ],
    why="With such an order the number of the step is all that a checkpoint must say of the data.",
)
def _(answer):
    assert callable(answer), (
        "your answer should be a function of step, batch, examples, rank and ranks"
    )
    for batch, examples in ((8, 40), (6, 33), (12, 12)):
        per_epoch = examples // batch
        orders = []
        for step in range(2 * per_epoch):
            alone = _share(answer, step, batch, examples, 0, 1)
            assert len(set(alone)) == batch == len(alone), (
                f"with one rank step {step} has {len(alone)} examples, {len(set(alone))} of them "
                f"different, and the batch is {batch}"
            )
            assert set(alone) <= set(range(examples)), (
                f"step {step} has examples that are not among the {examples}, numbered from 0"
            )
            for ranks in (2, 3, 4):
                shares = [_share(answer, step, batch, examples, r, ranks) for r in range(ranks)]
                together = sorted(number for share in shares for number in share)
                assert together == sorted(alone), (
                    f"in step {step} {ranks} ranks together have other examples than one rank has"
                )
                sizes = [len(share) for share in shares]
                assert max(sizes) - min(sizes) <= 1, f"{ranks} ranks have shares of {sizes}"
            orders.append(alone)
        for epoch in range(2):
            seen = sum(orders[epoch * per_epoch : (epoch + 1) * per_epoch], [])
            assert len(set(seen)) == len(seen), f"an example comes twice in epoch {epoch}"
        assert orders[:per_epoch] != orders[per_epoch:], "both epochs have the same order"
        assert _share(answer, 0, batch, examples, 0, 1) == orders[0], (
            "asked for the same step again, your function gives other examples"
        )


def _share(answer, *arguments: int) -> list[int]:
    given = answer(*arguments)
    given = [plain(number) for number in given] if isinstance(given, list) else given
    assert isinstance(given, list) and all(type(number) is int for number in given), (
        "your function should give back a list of whole numbers"
    )
    return given
