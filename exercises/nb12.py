"""Exercises of notebook 12: Accelerate and DeepSpeed."""

from __future__ import annotations

import math
import random

from by_hand import frameworks
from exercises.check import exercise
from exercises.comparisons import agree
from helpers.recipe import Recipe

RECIPE = Recipe("vit", batch_size=16, accumulation=4)


@exercise(
    "12.1",
    hints=[
        "How many optimizer steps has an epoch, when its last group may be smaller?",
        (
            "An epoch has math.ceil(batches / accumulation) steps. "
            "Divide the steps by that with a rest; each step of the rest is a full group."
        ),
    ],
    why="Counted in micro-batches, a partial group moves every later epoch's place",
)
def _(answer):
    agree(
        answer,
        _place,
        [(4, 2, 16), (8, 2, 16), (3, 4, 10), (4, 4, 10), (0, 4, 10), (5, 1, 3), (7, 8, 3)],
        lambda rng: (rng.randint(0, 40), rng.randint(1, 8), rng.randint(1, 30)),
    )


def _place(steps: int, accumulation: int, batches: int) -> tuple[int, int]:
    epoch, done = divmod(steps, math.ceil(batches / accumulation))
    return epoch, done * accumulation


@exercise(
    "12.2",
    hints=[
        "The gradient should be that of the sum divided by rows. By what else is it divided?",
        "Undo both divisions: multiply by steps and by ranks, whether the group is full or not.",
    ],
    why="Nothing in the answer asks whether the group is partial: rows knows it already",
)
def _(answer):
    agree(
        answer,
        lambda loss_sum, rows, steps, ranks: loss_sum / rows * steps * ranks,
        [(6.0, 8, 4, 1), (6.0, 3, 4, 1), (2.5, 16, 1, 2)],
        lambda rng: (rng.uniform(1, 20), rng.randint(1, 64), rng.randint(1, 8), rng.randint(1, 8)),
    )


@exercise(
    "12.3",
    hints=[
        (
            "config['zero_optimization'] has the stage, and offload_optimizer and offload_param "
            "where they are set. Ask for their device, too: 'none' offloads nothing."
        ),
        "With offload_optimizer the second and third number are 0; with offload_param the first.",
    ],
    why="A config is short; which bytes lie where follows from three of its keys",
)
def _(answer):
    def truth(config, ranks):
        zero = config["zero_optimization"]
        away, weights_away = (
            zero.get(part, {}).get("device", "none") != "none"
            for part in ("offload_optimizer", "offload_param")
        )
        stage = zero["stage"]
        return (
            0 if weights_away else 4 / _over(stage, 3, ranks),
            0 if away else 4 / _over(stage, 2, ranks),
            0 if away else 8 / _over(stage, 1, ranks),
        )

    def draw(rng: random.Random):
        stage = rng.randint(0, 3)
        return frameworks.zero_config(stage, RECIPE, stage >= 2 and rng.random() < 0.5), rng.choice(
            [1, 2, 4, 8, 64]
        )

    partly = frameworks.zero_config(3, RECIPE)
    partly["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    stays = frameworks.zero_config(3, RECIPE, True)
    stays["zero_optimization"]["offload_param"] = {"device": "none"}
    nothing = frameworks.zero_config(2, RECIPE)
    nothing["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    agree(
        answer,
        truth,
        [(frameworks.zero_config(stage, RECIPE), 4) for stage in range(4)]
        + [
            (frameworks.zero_config(2, RECIPE, True), 4),
            (frameworks.zero_config(3, RECIPE, True), 4),
            (partly, 8),
            (stays, 8),
            (nothing, 4),
        ],
        draw,
    )


@exercise(
    "12.4",
    hints=[
        "A plugin that was ignored leaves another kind than 'DEEPSPEED'.",
        (
            "With DeepSpeed on, compare what Accelerate counted with what was started; "
            "one of one is fine."
        ),
    ],
    why="Both failures train, and the loss falls: only these two lines of output tell them apart",
)
def _(answer):
    def truth(kind, counted, started):
        return "dropped" if kind != "DEEPSPEED" else "fine" if counted == started else "alone"

    examples = [
        ("MULTI_CPU", 2, 2),
        ("NO", 1, 1),
        ("DEEPSPEED", 1, 2),
        ("DEEPSPEED", 2, 2),
        ("DEEPSPEED", 1, 1),
        ("MULTI_GPU", 8, 8),
    ]
    agree(
        answer,
        truth,
        examples,
        lambda rng: rng.choice(
            [("DEEPSPEED", 1, rng.randint(2, 8)), ("MULTI_GPU", 4, 4), ("DEEPSPEED", 8, 8)]
        ),
    )


def _over(stage: int, since: int, ranks: int) -> int:
    return ranks if stage >= since else 1
