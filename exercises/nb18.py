"""Exercises of notebook 18: choosing a strategy."""

from __future__ import annotations

import random

from exercises.check import exercise
from exercises.comparisons import agree, same
from tight_fit.checks import plain
from tight_fit.units import span

PER_TOKEN = 6  # FLOPs per parameter and token, forward and backward
SENT = 2 + 2 + 4  # bytes per parameter: gathered twice in bf16, gradients reduced in fp32
WORDS = ("one GPU", "ddp", "fsdp", "context", "nothing")
# The job of lab exercise 4: Llama 3.1 8B, 16,384 tokens on each of 16 A100s at 0.4 of their peak.
PARAMETERS, TOKENS, RANKS, FLOPS = 8.03e9, 16_384, 16, 0.4 * 312e12


def seconds(parameters: float, tokens: float, ranks: int, flops: float, speed: float) -> tuple:
    """(seconds of computing, seconds of FSDP's messages) of a step, estimated by hand."""
    sent = SENT * parameters * (ranks - 1) / ranks
    return PER_TOKEN * parameters * tokens / flops, sent / speed


@exercise(
    "18.1",
    hints=[
        "Two times: FLOPs divided by FLOPs per second, and bytes divided by bytes per second.",
        (
            "FLOPs: 6 * parameters * tokens. Bytes: 8 * parameters * (ranks - 1) / ranks. "
            "What is hidden takes no time of its own, so the larger of the two counts."
        ),
    ],
    why=(
        "Both grow with the parameters, so the model's size cancels: tokens per GPU, the GPU and "
        "the link decide whether FSDP waits."
    ),
)
def _(answer):
    agree(answer, lambda *job: max(seconds(*job)), [], _some_job, times=40)


def _some_job(rng: random.Random) -> tuple:
    return (
        rng.uniform(0.5e9, 70e9),
        rng.choice((512, 2_048, 16_384, 65_536)),
        rng.choice((2, 4, 16, 256)),
        rng.choice((26e12, 125e12, 400e12)),
        rng.choice((0.11e9, 1.1e9, 12e9, 190e9, 370e9)),
    )


@exercise(
    "18.2",
    hints=[
        "Ask the tree's questions in its order, and return at the first that is answered.",
        (
            "One GPU holds states + example. FSDP holds states / gpus + example: an example stays "
            "whole. With context ranks both are divided by gpus."
        ),
    ],
    why=(
        "Two numbers, what the model takes and what one example takes, decide which layouts can "
        "fit at all; only then does time decide."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of states, example, memory and gpus"
    generator = random.Random(2)
    for _ in range(400):
        job = (
            generator.randint(1, 160),
            generator.randint(1, 120),
            generator.choice((12, 24, 80)),
            generator.choice((1, 2, 8)),
        )
        given, truth = answer(*job), fitting(*job)
        assert given in WORDS, f"your function should return one of {', '.join(WORDS)}"
        assert given == truth, (
            f"for states={job[0]}, example={job[1]}, memory={job[2]} and gpus={job[3]} "
            f"it should be {truth!r}, and yours is {given!r}"
        )


def fitting(states: int, example: int, memory: int, gpus: int) -> str:
    """The first layout of the lesson's tree that fits."""
    if states + example <= memory:
        return "one GPU" if gpus == 1 else "ddp"
    if gpus > 1 and states / gpus + example <= memory:
        return "fsdp"
    if gpus > 1 and (states + example) / gpus <= memory:
        return "context"
    return "nothing"


@exercise(
    "18.3",
    hints=[
        (
            "Write a GPU's peak under DDP as states + rows * per_row. "
            "What becomes of each part under stage 3?"
        ),
        (
            "The saving is states * (1 - 1 / ranks). Divide it by DDP's peak, "
            "set it equal to share, and solve for rows."
        ),
    ],
    why=(
        "ZeRO's saving is a constant. It matters as long as the activations are not far larger: "
        "that is the whole difference between a language model of billions and a small one."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of states, per_row, ranks and share"
    generator = random.Random(1)
    for _ in range(50):
        states, per_row, ranks, share = (
            generator.randint(10, 10**6),
            generator.randint(1, 10**4),
            generator.choice((2, 4, 8, 64)),
            generator.choice((0.1, 0.25, 0.5, 0.9)),
        )
        given = answer(states, per_row, ranks, share)
        truth = max(0.0, (states * (1 - 1 / ranks) / share - states) / per_row)
        same(
            given,
            truth,
            rel=1e-6,
            atol=1e-6,
            what=(
                f"the examples for states={states}, per_row={per_row}, ranks={ranks}, share={share}"
            ),
        )


def break_even() -> float:
    """Bytes per second at which FSDP's messages take as long as the computing beside them."""
    work, sent = seconds(PARAMETERS, TOKENS, RANKS, FLOPS, 1.0)
    return sent / work


@exercise(
    "18.4",
    hints=[
        "Set the two times of exercise 18.1 equal, and solve for the speed.",
        "speed = 8 * (15 / 16) * flops / (6 * tokens): the parameters cancel.",
    ],
    why=(
        "One number to hold beside the network's data sheet: below it, send less (a replica or a "
        "stage in each machine) or give each GPU more tokens."
    ),
)
def _(answer):
    answer = plain(answer)
    assert isinstance(answer, (int, float)) and not isinstance(answer, bool), (
        "your answer should be a number: bytes per second"
    )
    assert answer > 1e6, "bytes per second, please: 10 Gbit/s are 1.1e9 of them in practice"
    work, sent = map(span, seconds(PARAMETERS, TOKENS, RANKS, FLOPS, answer))
    assert abs(answer / break_even() - 1) < 0.05, (
        f"at {answer:.3g} bytes per second the messages take {sent}, and the work {work}"
    )
