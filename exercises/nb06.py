"""Exercises of notebook 06: gradient checkpointing."""

from __future__ import annotations

import math
import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from exercises.check import exercise
from exercises.comparisons import agree, close, same, whole_number
from exercises.handout import observe
from tight_fit.trace.storage_trace import ACTIVATIONS, BORN, DIES, PARAMETERS
from tight_fit.trace.tracker import Tracker, steady_memory

LAYERS, KEPT = 64, 4  # of exercise 1; what a layer keeps, in units of its input
WIDTH = 24


@exercise(
    "06.1",
    hints=[
        (
            "Count in inputs: the checkpoints take 64 / s, the one segment that is alive 4 s. "
            "Add the two for a few s."
        ),
        "The sum is least where the two terms are equal: s = sqrt(n / a), not sqrt(n).",
    ],
    why=(
        "What a layer keeps inside decides the segment's length; "
        "the square root of the depth is right only for layers that keep no more "
        "than their input."
    ),
)
def _(answer):
    answer = whole_number(answer, "layers")
    assert 1 <= answer <= LAYERS, f"a segment has from 1 to {LAYERS} layers"

    def peak(segment: int) -> float:
        return LAYERS / segment + segment * KEPT

    best = min(range(1, LAYERS + 1), key=peak)
    assert answer == best, (
        f"segments of {answer} take {peak(answer):.0f} inputs, "
        f"and segments {'longer' if answer < best else 'shorter'} than that take less"
    )


@exercise(
    "06.2",
    hints=[
        "Count forward passes of single layers: a plain step is worth 1 + 2 for each of the 24.",
        "20 of the 24 layers are run forward once more, so a step is worth 24 x 3 + 20.",
    ],
    why="The last segment is free to keep: its peak is reached in any case.",
)
def _(answer):
    close(answer, (24 * 3 + 20) / (24 * 3))


@exercise(
    "06.3",
    hints=[
        (
            "Loop over the starts of the segments; "
            "a segment is the last one if it reaches the end of the list."
        ),
        (
            "checkpoint(function, x, use_reentrant=False), "
            "and mind that a lambda in a loop sees the loop's last values: bind them as defaults."
        ),
    ],
    why=(
        "torch.utils.checkpoint.checkpoint_sequential leaves out the last segment "
        "for the same reason."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of layers, x and segment"
    for depth, segment in ((6, 2), (7, 3), (4, 4), (5, 1), (3, 8)):
        case = f"{depth} layers in segments of {segment}"
        x = torch.randn(8, WIDTH)
        truth, _, _, gradients = _measured(_all_kept, depth, x, segment)
        reference = _measured(_keep_last, depth, x, segment)
        output, calls, held, ours = observe(_measured, answer, depth, x, segment)
        same(output, truth, rel=1e-6, what=f"the output of {case}")
        for gradient, wanted in zip(ours, gradients, strict=True):
            assert gradient is not None, (
                f"with {case} a parameter has no gradient: is it the non-reentrant kind?"
            )
            same(gradient, wanted, rel=1e-5, atol=1e-7, what=f"a gradient of {case}")
        kept = depth - (depth - 1) // segment * segment
        assert all(count == 1 for count in calls[-kept:]), (
            f"with {case} the last {kept} should run once, and not again in the backward pass"
        )
        assert all(count == 2 for count in calls[:-kept]), (
            f"with {case} all but the last {kept} should run twice: "
            "forward, and again in the backward pass"
        )
        assert held <= 1.01 * reference[2], (
            f"with {case} you keep {held / reference[2]:.2f} times the bytes that you should "
            "from forward to backward pass: is each checkpoint a whole segment?"
        )


@exercise(
    "06.4",
    hints=[
        "After two updates the old statistics weigh (1 - m')(1 - m').",
        "That should be 1 - m; solve for m'.",
    ],
    why=(
        "A checkpointed BatchNorm would else forget twice as fast, "
        "and only evaluation would notice."
    ),
)
def _(answer):
    agree(
        answer,
        lambda m: 1 - math.sqrt(1 - m),
        [(0.1,), (0.5,), (0.0,), (1.0,)],
        _some_momentum,
        rel=1e-6,
        atol=1e-9,
    )


def _some_momentum(rng: random.Random) -> tuple[float]:
    return (rng.uniform(0.01, 0.9),)


def _layers(depth: int) -> nn.ModuleList:
    """Layers with dropout that keep several times their input, the same ones each time."""
    torch.manual_seed(depth)
    return nn.ModuleList(
        nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Tanh(),
        )
        for _ in range(depth)
    )


def _through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def _all_kept(layers, x, segment):
    return _through(layers, x)


def _keep_last(layers, x, segment):
    for start in range(0, len(layers), segment):
        part = layers[start : start + segment]
        x = (
            checkpoint(_through, part, x, use_reentrant=False)
            if start + segment < len(layers)
            else _through(part, x)
        )
    return x


def _measured(
    function, depth: int, x: torch.Tensor, segment: int
) -> tuple[torch.Tensor, list[int], int, list[torch.Tensor | None]]:
    """Run forward and backward: the output, the runs of each layer, the bytes held between, and
    the gradients.

    The bytes are those of all storages but the parameters' that live from the forward pass into
    the backward pass.
    """
    layers = _layers(depth)
    calls = [0] * len(layers)

    def count(index: int):
        def hook(module, inputs):
            calls[index] += 1

        return hook

    handles = [layer.register_forward_pre_hook(count(index)) for index, layer in enumerate(layers)]
    torch.manual_seed(1)
    with steady_memory(), Tracker() as tracker:
        tracker.adopt(list(layers.parameters()), PARAMETERS)
        tracker.adopt(x, ACTIVATIONS)
        given = function(layers, x, segment)
        assert isinstance(given, torch.Tensor), (
            "your function should return the last layer's output"
        )
        loss = given.square().sum()
        output = given.detach().clone()
        del given
        tracker.phase("backward")
        loss.backward()
    for handle in handles:
        handle.remove()
    held = sum(
        {BORN: 1, DIES: -1}.get(kind, 0) * tracker.storage_trace.bytes[storage]
        for kind, storage, _, phase in tracker.storage_trace.events
        if phase == 0
    )
    weights = sum(parameter.nbytes for parameter in layers.parameters())
    return output, calls, held - weights, [parameter.grad for parameter in layers.parameters()]
