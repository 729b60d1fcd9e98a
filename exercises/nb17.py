"""Exercises of notebook 17: large batches, LARS and LAMB."""

from __future__ import annotations

import math
import random

import torch

from exercises.check import exercise
from exercises.comparisons import agree, close, same

# Of exercise 1; the learning rate is that of batches of 16 examples.
EXAMPLES, EPOCHS, BATCH, LEARNING_RATE = 5485, 3, 512, 0.001
HIGH = 10.0  # upper limit of the norm in the notebook's LAMB


@exercise(
    "17.1",
    hints=[
        (
            "An epoch is 5,485 examples in groups of 512, "
            "and the group that is left over gets its step too."
        ),
        (
            "The batch is 32 times as large: one rule multiplies the learning rate by 32, "
            "the other by its square root."
        ),
    ],
    why="Between the two rules lies a factor of nearly six, and neither of them is a law.",
)
def _(answer):
    assert isinstance(answer, (list, tuple)) and len(answer) == 3, (
        "your answer should be three numbers: (updates, learning rate, learning rate)"
    )
    factor = BATCH / 16
    same(answer[0], EPOCHS * math.ceil(EXAMPLES / BATCH), what="the number of updates")
    close(
        answer[1],
        LEARNING_RATE * math.sqrt(factor),
        rel=0.005,
        what="the learning rate by the square root",
    )
    close(answer[2], LEARNING_RATE * factor, rel=0.005, what="the learning rate by the linear rule")


@exercise(
    "17.2",
    hints=[
        "First u = m / (v.sqrt() + 1e-8) + decay * weight; the step is lr * ratio * u.",
        (
            "ratio = length of the weights, 10 at most, / length of u; 1 where one of the two "
            "lengths is 0. x.norm() is a tensor's length."
        ),
    ],
    why=(
        "With the limit of 10 the large tensors of large models get far smaller steps than "
        "without it: an embedding of 128,100 x 768 numbers of about 0.05 has a length of 496."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of five arguments"
    torch.manual_seed(17)
    for size, still, lr, decay, case in (
        (0.1, False, 0.01, 0.0, "small weights"),
        (0.1, False, 0.02, 0.1, "small weights and decay"),
        (5.0, False, 0.01, 0.01, "weights longer than 10"),
        (0.0, False, 0.01, 0.1, "weights of zero"),
        (0.1, True, 0.01, 0.0, "an update of zero"),
    ):
        weight, m, v = size * torch.randn(6, 4), torch.randn(6, 4), torch.rand(6, 4) + 0.1
        m = 0 * m if still else m
        u = m / (v.sqrt() + 1e-8) + decay * weight
        length, moved = min(weight.norm().item(), HIGH), u.norm().item()
        wanted = weight - lr * (length / moved if length and moved else 1.0) * u
        given = answer(weight.clone(), m.clone(), v.clone(), lr, decay)
        same(given, wanted, rel=1e-4, atol=1e-7, what=f"the new weight, for {case},")


@exercise(
    "17.4",
    hints=[
        (
            "Compare with the notebook's class: what happens to m and v before the quotient, "
            "and which vector's norm is taken?"
        ),
        (
            "Bias corrections are missing, the norm leaves out decay * w, "
            "and a tensor of zeros can never move: its ratio should be 1."
        ),
    ],
    why=(
        "Without the corrections only the first steps differ, "
        "as their common factor cancels in the ratio; with decay it does not cancel."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function"
    for decay, zeros, still in (
        (0.0, False, False),
        (0.1, False, False),
        (0.0, True, False),
        (0.1, True, False),
        (0.0, False, True),
    ):
        case = (
            f"decay={decay:g}"
            + (", weights of zero" if zeros else "")
            + (", gradients of zero" if still else "")
        )
        start = torch.zeros(12, 8) if zeros else torch.randn(12, 8) * 0.1
        mine, theirs = ([start.clone(), torch.zeros(12, 8), torch.zeros(12, 8)] for _ in range(2))
        for t in range(1, 5):
            # The smaller the gradient is, the more eps counts.
            g = torch.zeros(12, 8) if still else torch.randn(12, 8) * 10.0**-t
            answer(mine[0], g.clone(), mine[1], mine[2], t, 0.01, decay)
            _lamb_step(theirs[0], g, theirs[1], theirs[2], t, 0.01, decay)
            for given, truth, name in zip(mine, theirs, ("w", "m", "v")):
                same(given, truth, rel=1e-4, atol=1e-9, what=f"{name} after step {t} with {case}")


@exercise(
    "17.3",
    hints=[
        (
            "Two equations: squares = L + S / b and whole = L + S / B, "
            "with L the true gradient's square and S the trace of the covariance."
        ),
        (
            "A step is worth 1 / (1 + scale / batch) of the greatest: "
            "one half where the batch equals the scale S / L."
        ),
    ],
    why=(
        "Those who train on many GPUs can watch the noise scale during training for free, "
        "and raise the batch as it grows."
    ),
)
def _(answer):
    agree(answer, _critical, [(16, 10.0, 256, 4.0), (1, 3.0, 2, 2.5)], _some_norms, rel=1e-6)
    # Mostly noise: the estimate of the true square is negative, or zero.
    for norms in ((32, 5.0, 64, 2.0), (8, 4.0, 32, 1.0)):
        given = answer(*norms)
        assert given == math.inf, (
            f"for {norms} the estimate of the true gradient's square is not positive, "
            f"and yours is {given}"
        )


def _some_norms(rng: random.Random) -> tuple[int, float, int, float]:
    b = rng.choice((1, 4, 16))
    length, trace, group = rng.uniform(0.1, 3), rng.uniform(1, 500), b * rng.choice((2, 8, 32))
    return b, length + trace / b, group, length + trace / group


def _critical(b: int, squares: float, B: int, whole: float) -> float:
    length = (B * whole - b * squares) / (B - b)
    return (squares - whole) / (1 / b - 1 / B) / length if length > 0 else math.inf


def _lamb_step(w, g, m, v, t, lr, decay, beta1=0.9, beta2=0.999, eps=1e-6):
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    r = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + decay * w
    length, step = w.norm(), r.norm()
    w.sub_(lr * (length / step if length > 0 and step > 0 else 1.0) * r)
