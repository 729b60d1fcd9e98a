"""Exercises of notebook 20: a language model on one GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from exercises.check import exercise
from exercises.comparisons import close, same
from exercises.handout import observe

TOKENS, WIDTH, VOCABULARY, CHUNK = 60, 8, 400, 7


@exercise(
    "20.1",
    hints=[
        "Each token has one number for each word of the vocabulary; a number in fp32 has 4 bytes.",
        "4 x 2,048 tokens, times 128,256 words, times 4 bytes.",
    ],
    why="And a plain loss holds several tensors of this size at once",
)
def _(answer):
    close(answer, 4 * 2048 * 128_256 * 4, rel=1e-6, unit="bytes")


@exercise(
    "20.2",
    hints=[
        "Leave out the last state and the first label; then state and label of a place belong.",
        (
            "checkpoint(part, states, wanted, use_reentrant=False) with a part that returns the "
            "sum of its losses; divide by the number of labels that are not -100."
        ),
    ],
    why="Only a chunk's logits are ever in memory, and the loss is that of all of them",
)
def _(answer):
    assert callable(answer), "your answer should be a function of head, hidden, labels and chunk"
    for index, (case, *_) in enumerate(_cases()):
        _, head, hidden, labels = _cases()[index]
        loss = F.cross_entropy(head(hidden[:-1]), labels[1:])
        wanted = (loss.detach(), *torch.autograd.grad(loss, (hidden, head.weight)))
        seen = observe(_chunked, answer, index)
        for what, given, right in zip(
            ("the loss", "the gradient of hidden", "that of head.weight"), seen["found"], wanted
        ):
            same(given, right, rel=1e-4, atol=1e-6, what=f"{what} {case}")
        assert seen["most"] <= CHUNK, (
            f"head was called on {seen['most']} states at once {case}, and chunk is {CHUNK}"
        )
        assert seen["kept"] < TOKENS * VOCABULARY * 4 / 2, (
            f"{seen['kept']:,} bytes are kept for the backward pass {case}: the logits are"
        )


def _cases() -> list[tuple[str, nn.Linear, torch.Tensor, torch.Tensor]]:
    """(which labels count, head, hidden states, labels), the same in every process."""
    made = []
    for case, left_out in (("where all labels count", 0), ("where some labels are -100", 25)):
        generator = torch.Generator().manual_seed(left_out)
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        head.weight.data = torch.randn(VOCABULARY, WIDTH, generator=generator)
        hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
        labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        labels[:left_out] = -100
        made.append((case, head, hidden, labels))
    return made


def _chunked(answer, index: int) -> dict:
    """What a function gives, the most states that its head saw, and the bytes that it keeps."""
    _, head, hidden, labels = _cases()[index]
    rows, kept = [0], {}
    head.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = answer(head, hidden, labels, CHUNK)
    found = (loss.detach(), *torch.autograd.grad(loss, (hidden, head.weight)))
    return {"found": found, "most": max(rows), "kept": sum(kept.values())}


@exercise(
    "20.3",
    hints=[
        "x / step lies between two whole numbers; how far from the lower one is the chance.",
        "(x / step + torch.rand_like(x)).floor() * step",
    ],
    why="Rounding to nearest loses every update below half a step; this loses none in the mean",
)
def _(answer):
    assert callable(answer), "your answer should be a function of x and step"
    torch.manual_seed(3)
    for value, step in ((1.001, 0.0078125), (-0.3, 0.25), (0.4, 0.5), (2.0, 0.5)):
        x = torch.full((40_000,), value)
        given = answer(x.clone(), step)
        case = f"for numbers of {value} and a step of {step}"
        assert isinstance(given, torch.Tensor) and given.shape == x.shape, (
            f"your function should return a tensor of the shape of x {case}"
        )
        lower = torch.floor(torch.tensor(value / step)) * step
        off = torch.minimum((given - lower).abs(), (given - lower - step).abs())
        assert bool((off < 1e-4 * step).all()), f"not every number is next to its own {case}"
        same(given.mean(), value, rel=0, atol=0.02 * step, what=f"the mean {case}")
