"""Exercises of notebook 04: mixed precision."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import nn

from exercises.check import exercise
from exercises.comparisons import close, same
from exercises.handout import observe
from tight_fit.checks import plain

WEIGHT, MANTISSA = 0.3, 7  # of exercise 1: bf16's bits
TAIL = 0.05  # of exercise 4: largest relative error


@exercise(
    "04.1",
    hints=[
        (
            "The spacing of bf16 between 0.25 and 0.5 is 0.25 divided by 2 to the number "
            "of its mantissa bits."
        ),
        (
            "The spacing there is 2^-9. A sum is rounded to the nearest neighbour, so a step of up "
            "to half of it is lost."
        ),
    ],
    why=(
        "A fine-tune's usual learning rates are far below that: bf16 weights need fp32 masters, "
        "or rounding at random"
    ),
)
def _(answer):
    spacing = 2.0 ** (math.floor(math.log2(WEIGHT)) - MANTISSA)
    answer = plain(answer)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        assert not math.isclose(answer, spacing, rel_tol=0.01), (
            "a step of a whole spacing moves the weight; it moves sooner than that"
        )
    close(answer, spacing / 2, rel=0.01)


@exercise(
    "04.2",
    hints=[
        (
            "Count what is fp32: the weight, its gradient from the micro-batches before, "
            "and two states of AdamW."
        ),
        (
            "Four fp32 numbers are 16 bytes. "
            "What does autocast hold for the backward pass beside them?"
        ),
    ],
    why="Autocast adds to what a weight costs; it saves on activations only",
)
def _(answer):
    close(answer, 4 + 4 + 2 * 4 + 2, rel=1e-6, unit="bytes")


@exercise(
    "04.3",
    hints=[
        (
            "scaler.scale(loss).backward() for each; after the last, once: scaler.unscale_, "
            "clip, scaler.step, scaler.update, zero_grad."
        ),
        (
            "scaler.step returns nothing that tells; the scale does: "
            "it falls in update exactly when a step was skipped."
        ),
    ],
    why=(
        "A schedule that counts skipped steps runs ahead of the training, "
        "through the warm-up above all"
    ),
)
def _(answer):
    assert callable(answer), (
        "your answer should be a function of model, losses, optimizer, scheduler, scaler and limit"
    )
    cases = {
        "a clipped group": ([3.0, 4.0], 0.1, 2000),
        "a group below the limit": ([0.1], 100.0, 2000),
        "a group in which the second micro-batch overflows": ([1.0, math.inf, 1.0], 1.0, 2000),
        "a group after which the scale grows": ([1.0, 2.0, 0.5], 0.5, 1),
    }
    for name, (factors, limit, growth) in cases.items():
        mine = observe(_trained, answer, factors, growth, limit)
        truth = _trained(_group_step, factors, growth, limit)
        returned, stepped = plain(mine["returned"]), truth["returned"]
        moves = "should move by one" if stepped else "moves, although nothing was updated"
        did = "stepped" if stepped else "did not step"
        case = f"for {name}"
        assert isinstance(returned, bool), f"{case} your function should return True or False"
        assert mine["updates"] == truth["updates"], (
            f"{case} the optimizer steps {mine['updates']} times and should {truth['updates']}"
        )
        assert mine["scale"] == truth["scale"], (
            f"{case} the scale ends at {mine['scale']:g}: is update called once?"
        )
        same(mine["weights"], truth["weights"], rel=1e-5, atol=1e-7, what=f"the weight {case}")
        assert mine["cleared"], f"{case} gradients are left over for the next group"
        assert mine["epoch"] == truth["epoch"], f"{case} the scheduler {moves}"
        assert returned == stepped, f"{case} you return {returned}, and the optimizer {did}"


@exercise(
    "04.4",
    hints=[
        (
            "1 + exp(-2u) overflows nowhere from -4 to 4 if you compute exp once, "
            "and x divided by it needs no subtraction."
        ),
        (
            "np.float16(0.7979), np.float16(0.03568): "
            "constants as float16 keep the whole computation in float16."
        ),
    ],
    why=(
        "The formula decides what fp16 is good for: where nothing cancels, "
        "eleven bits go a long way"
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of an array of float16"
    x = np.linspace(-4, 4, 1601).astype(np.float16)
    x = x[x != 0]
    halves, given = observe(_halved, answer, x)
    assert halves, "compute with the array you are given, in NumPy: it watches the types"
    assert given.dtype == np.float16, f"your result is {given.dtype} and should be float16"
    assert given.shape == x.shape, f"your result has shape {given.shape} and not {x.shape}"
    values, exact = np.asarray(given, dtype=np.float64), x.astype(np.float64)
    a = math.sqrt(2 / math.pi)
    truth = exact / (1 + np.exp(-2 * exact * (a + 0.044715 * a * exact**2)))
    apart = np.abs(values / truth - 1)
    assert np.isfinite(values).all(), "your function gives NaN or infinity for some x"
    worst = int(apart.argmax())
    assert apart[worst] < TAIL, (
        f"for x = {exact[worst]:.3g} your function is off by {apart[worst]:.0%} of the true value"
    )


def _halved(answer, x: np.ndarray) -> tuple:
    """Whether the answer gives an array that stayed in float16, and what it gives."""
    given = answer(x.view(_OnlyHalf))
    return isinstance(given, _OnlyHalf), np.asarray(given)


class _OnlyHalf(np.ndarray):
    """An array that refuses every operation in a type other than float16."""

    def __array_ufunc__(self, function, method, *inputs, out=None, **rest):
        arrays = [np.asarray(value) if isinstance(value, np.ndarray) else value for value in inputs]
        wrong = [
            value.dtype
            for value in arrays
            if isinstance(value, (np.ndarray, np.generic)) and value.dtype != np.float16
        ]
        if wrong or rest.get("dtype") not in (None, np.float16):
            raise TypeError(
                f"{function.__name__} in {(wrong or [rest.get('dtype')])[0]}: stay in float16"
            )
        if out is not None:
            rest["out"] = tuple(np.asarray(value) for value in out)
        result = getattr(function, method)(*arrays, **rest)
        return result.view(_OnlyHalf) if isinstance(result, np.ndarray) else result

    def astype(self, dtype, *args, **rest):
        if np.dtype(dtype) != np.float16:
            raise TypeError(f"astype({np.dtype(dtype)}): stay in float16")
        return super().astype(dtype, *args, **rest)


class _Training:
    """A small linear model with its optimizer, schedule, scaler, and one group of micro-batches."""

    def __init__(self, factors: list[float], growth: int):
        torch.manual_seed(0)
        self.model = nn.Linear(6, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: 1 / (1 + done)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth)
        inputs = torch.randn(len(factors), 4, 6)
        self.losses = [self._loss(x, factor) for x, factor in zip(inputs, factors)]
        self.updates = 0
        self.optimizer.register_step_post_hook(self._count)

    def _loss(self, x: torch.Tensor, factor: float):
        return lambda: self.model(x).square().mean() * factor

    def _count(self, *_):
        self.updates += 1

    def run(self, function, limit: float):
        with warnings.catch_warnings():
            # PyTorch warns of a scheduler that runs ahead; the exercise has a sentence for that.
            warnings.simplefilter("ignore")
            return function(
                self.model, list(self.losses), self.optimizer, self.scheduler, self.scaler, limit
            )


def _trained(function, factors: list[float], growth: int, limit: float) -> dict:
    """What a function returns for one group, and what it leaves behind."""
    training = _Training(factors, growth)
    returned = training.run(function, limit)
    parameters = list(training.model.parameters())
    return {
        "returned": returned,
        "updates": training.updates,
        "scale": training.scaler.get_scale(),
        "weights": [parameter.detach() for parameter in parameters],
        "cleared": all(p.grad is None or not p.grad.any() for p in parameters),
        "epoch": training.scheduler.last_epoch,
    }


def _group_step(model, losses, optimizer, scheduler, scaler, limit) -> bool:
    for loss in losses:
        scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    stepped = scaler.get_scale() >= before
    if stepped:
        scheduler.step()
    return stepped
