"""Exercises of notebook 02: gradient accumulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from exercises.check import exercise
from exercises.comparisons import close, same, whole_number
from exercises.handout import observe
from helpers.plan import plan
from helpers.recipe import Recipe, replace

GPU = "RTX 3060"
TEXT = Recipe("deberta", profile="full", batch_size=40, length=256)
IGNORED = -100  # the label of a token that no loss counts
VOCABULARY = 11


@exercise(
    "02.1",
    hints=[
        (
            "Which micro-batches of the first epoch never saw an optimizer.step? "
            "Their gradients are still in p.grad."
        ),
        "Three are left over, four are added, and each was divided by k.",
    ],
    why=(
        "A group that is not flushed is not lost, which would be bad enough: "
        "it leaks into the next epoch."
    ),
)
def _(answer):
    weight = torch.zeros(1, requires_grad=True)  # a model whose gradient is 1 for every micro-batch
    steps = []
    for _ in range(2):
        for number in range(1, 12):
            (weight / 4).sum().backward()
            if number % 4 == 0:
                steps.append(weight.grad.item())
                weight.grad = None
    close(answer, steps[2], rel=1e-6)


@exercise(
    "02.2",
    hints=[
        (
            "A micro-batch that fits alone may not fit under accumulation: "
            "what else is alive from the second one on?"
        ),
        (
            "Plan the recipe with its accumulation, not a smaller batch; "
            "the accumulation must divide 40."
        ),
    ],
    why=(
        "Gradients wait for their group to end, so a micro-batch has less room "
        "than a batch of its size."
    ),
)
def _(answer):
    answer = whole_number(answer, "micro-batches")
    assert 1 <= answer <= 40 and 40 % answer == 0, (
        "the number of micro-batches should divide the 40 examples"
    )
    divided = plan(replace(TEXT, accumulation=answer)).fits(GPU)
    assert divided, f"with accumulation={answer} the step {divided}"
    fewer = max((number for number in range(1, answer) if 40 % number == 0), default=None)
    assert fewer is None or not plan(replace(TEXT, accumulation=fewer)).fits(GPU), (
        "fewer micro-batches fit too"
    )


@exercise(
    "02.3",
    hints=[
        (
            "Count the labels that are not -100 in the whole group before the first backward "
            "pass; a generator can be read only once."
        ),
        (
            "Sum the losses of a micro-batch (reduction='sum') and divide by the tokens "
            "of the group; step and clear once."
        ),
    ],
    why=(
        "It is the whole technique, and it is right for a loss per example, per token, "
        "and for groups of any size."
    ),
)
def _(answer):
    assert callable(answer), (
        "your answer should be a function of a model, an optimizer and micro-batches"
    )
    for name, sizes, empty, lazy in (
        ("four equal micro-batches", (2, 2, 2, 2), None, False),
        ("a partial last micro-batch", (3, 3, 1), None, False),
        ("a group of one", (2,), None, False),
        ("a micro-batch without any counted token", (2, 2, 2), 1, False),
        ("micro-batches from a generator", (2, 2, 1), None, True),
    ):
        group = _group(sizes, empty)
        model = _model()
        start = {key: value.clone() for key, value in model.state_dict().items()}
        loss = _full_batch(model, group)
        seen = observe(_trained, answer, start, group, lazy, max(sizes))
        assert seen["steps"] == 1, (
            f"with {name}, optimizer.step() was called {seen['steps']} times and not once"
        )
        for weight, truth in zip(seen["weights"], model.parameters(), strict=True):
            same(weight, truth, rel=1e-9, atol=1e-12, what=f"a weight after the step with {name}")
        assert not seen["whole"], (
            "your function runs the model on more examples than a micro-batch holds: "
            "that saves no memory"
        )
        assert not seen["late"], (
            "your function runs a second forward pass before the first backward pass: "
            "that saves no memory"
        )
        assert seen["cleared"], "the gradients are not cleared after the step"
        given = seen["given"]
        assert given is not None, "your function should return the mean loss per counted token"
        close(float(given), loss, rel=1e-6, what=f"the mean loss of {name}")


@exercise(
    "02.4",
    hints=[
        "Work backwards: the last micro-batch should weigh m/k, so that is its momentum.",
        (
            "What micro-batch j leaves is later shrunk by each momentum after it: "
            "m_j times those (1 - m_i) must be m/k."
        ),
    ],
    why=(
        "With these, running statistics weigh as in the full batch; "
        "what happens inside a micro-batch stays as it was."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of m and k"
    generator = torch.Generator().manual_seed(0)
    for m, k in ((0.1, 1), (0.1, 2), (0.1, 4), (0.3, 8), (1.0, 4)):
        given = answer(m, k)
        assert isinstance(given, (list, tuple)) and len(given) == k, (
            f"for m={m} and k={k} it should give a list of {k} momenta"
        )
        start, means = (torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(2))
        means = means + torch.randn(k, 5, dtype=torch.float64, generator=generator)
        running = start.clone()
        for momentum, mean in zip(given, means):
            running = (1 - momentum) * running + momentum * mean
        same(
            running,
            (1 - m) * start + m * means.mean(0),
            rel=1e-6,
            atol=1e-9,
            what=f"the running mean after a group with m={m} and k={k}",
        )


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 6), torch.nn.Linear(6, VOCABULARY)
    ).double()


def _trained(answer, start: dict, group: list, lazy: bool, most: int) -> dict:
    """What the answer does to a model with these weights, and how."""
    model = _model()
    model.load_state_dict(start)
    optimizer, watch = _Counting(model.parameters(), lr=0.5), _Watch(model, most)
    given = answer(model, optimizer, (pair for pair in group) if lazy else group)
    return {
        "given": given,
        "steps": optimizer.count,
        "weights": [parameter.detach() for parameter in model.parameters()],
        "whole": watch.whole,
        "late": watch.late,
        "cleared": all(p.grad is None or not p.grad.any() for p in model.parameters()),
    }


class _Counting(torch.optim.SGD):
    """SGD that counts its steps."""

    count = 0

    def step(self, *arguments, **named):
        self.count += 1
        return super().step(*arguments, **named)


class _Watch:
    """Watches forward passes.

    whole  whether one had more than `most` examples
    late   whether one came before the gradients of the one before it
    """

    def __init__(self, model: torch.nn.Module, most: int):
        self.whole, self.late, self.before, self.most = False, False, 0, most
        model.register_forward_pre_hook(self._look)

    def _look(self, model, inputs):
        self.whole |= len(inputs[0]) > self.most
        self.late |= self.before > 0 and all(
            parameter.grad is None for parameter in model.parameters()
        )
        self.before += 1


def _group(sizes, empty) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of (inputs, labels), both int64 of shape (examples, 7).

    Their numbers of counted tokens differ; the micro-batch with the index `empty` has none.
    """
    pairs = []
    for index, examples in enumerate(sizes):
        inputs, labels = torch.randint(VOCABULARY, (2, examples, 7))
        counted = torch.rand(examples, 7) < 0.25 + 0.6 * (index % 2)
        counted[0, 0] = True
        if index == empty:
            counted[:] = False
        pairs.append((inputs, labels.masked_fill(~counted, IGNORED)))
    return pairs


def _full_batch(model: torch.nn.Module, group) -> float:
    """One SGD step on the whole group at once; its mean loss per counted token."""
    inputs, labels = (torch.cat(parts) for parts in zip(*group))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    optimizer.step()
    return loss.item()
