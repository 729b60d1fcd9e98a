"""LARS and LAMB, of lab 17's cells and of the sweeps, against the papers' algorithms in NumPy."""

import nbformat
import numpy as np
import pytest
import torch

from benchmarks.sweeps import layerwise
from tests.small import ROOT
from tight_fit.techniques.optimizers import states

NOTEBOOK = ROOT / "notebooks" / "labs" / "17_large_batch_lamb_lab.ipynb"
STEPS, RATE = 6, 0.01
SHAPES = (64, 96), (7,), (3, 4, 5), (1,)


def from_notebook(name):
    """The class of that name, from the first cell of the lab that begins with it."""
    sources = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells]
    (source, *_) = [one for one in sources if one.startswith(f"class {name}(")]
    scope = {"torch": torch}
    exec(compile(source, f"{NOTEBOOK.name}:{name}", "exec"), scope)
    return scope[name]


def lamb_2020(x, slopes, weight_decay=0.0, low=0.0, high=10.0, betas=(0.9, 0.999), eps=1e-6):
    """You et al. 2020, Algorithm 2, phi(z) = min(max(z, low), high); ratio 1 where a norm is 0."""
    (beta1, beta2), m, v, seen = betas, np.zeros_like(x), np.zeros_like(x), []
    for t, g in enumerate(slopes, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * np.square(g)
        r = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        u = r + weight_decay * x
        norms = np.linalg.norm(x), np.linalg.norm(u)
        x = x - RATE * (min(max(norms[0], low), high) / norms[1] if min(norms) > 0 else 1.0) * u
        seen.append(x)
    return seen


def lars_2017(w, slopes, weight_decay=0.0, momentum=0.9, trust=0.001):
    """You et al. 2017, Algorithm 1; a local rate of 1 where a norm is zero."""
    v, seen = np.zeros_like(w), []
    for g in slopes:
        norms = np.linalg.norm(w), np.linalg.norm(g)
        local = trust * norms[0] / (norms[1] + weight_decay * norms[0]) if min(norms) > 0 else 1.0
        v = momentum * v + RATE * local * (g + weight_decay * w)
        w = w - v
        seen.append(w)
    return seen


Lars, Lamb = from_notebook("Lars"), from_notebook("Lamb")
# (class, the paper's algorithm, states that it keeps of each weight)
EACH = pytest.mark.parametrize(
    "make, paper, kept",
    [(Lamb, lamb_2020, 2), (Lars, lars_2017, 1), (layerwise.Lamb, lamb_2020, 2),
     (layerwise.Lars, lars_2017, 1)],
    ids=["Lamb of the lab", "Lars of the lab", "Lamb of the sweeps", "Lars of the sweeps"],
)  # fmt: skip
SETTINGS = {
    lamb_2020: [
        {"weight_decay": 0.1}, {"high": 0.5, "weight_decay": 0.1}, {"low": 20.0, "high": 1e9},
        {"betas": (0.5, 0.9), "eps": 1e-3},
    ],
    lars_2017: [
        {"weight_decay": 0.1}, {"momentum": 0.0}, {"trust": 0.5, "weight_decay": 0.01},
    ],
}  # fmt: skip


def numbers(seed, scale, shapes=SHAPES, steps=()):
    draw = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(*steps, *shape, generator=draw) for shape in shapes]


def stepped(make, start, slopes, **settings):
    """The weights after each step of one optimizer of them all, and that optimizer."""
    weights = [torch.nn.Parameter(w.clone()) for w in start]
    optimizer, seen = make(weights, lr=RATE, **settings), []
    for step in range(len(slopes[0])):
        for w, g in zip(weights, slopes):
            w.grad = g[step].clone()
        optimizer.step()
        seen.append([w.detach().clone() for w in weights])
    return seen, optimizer


def agrees(seen, paper, start, slopes, within, **settings):
    """Assert that each weight went the paper's way, by itself, in double precision."""
    for number, (w, g) in enumerate(zip(start, slopes)):
        truth = paper(w.double().numpy(), g.double().numpy(), **settings)
        for step, (now, there) in enumerate(zip(seen, map(torch.as_tensor, truth), strict=True)):
            apart = ((now[number].double() - there).norm() / (there.norm() or 1)).item()
            assert apart < within, f"weight {number} is {apart:.1e} off after step {step}"


@EACH
def test_each_weight_goes_the_papers_way(make, paper, kept):
    start, slopes = numbers(0, 0.5), numbers(1, 0.1, steps=(STEPS,))
    given = [{}, *SETTINGS[paper]] if make in (Lamb, Lars) else [{"weight_decay": 0.1}]
    for settings in given:
        seen, optimizer = stepped(make, start, slopes, **settings)
        agrees(seen, paper, start, slopes, 3e-6, **settings)
    held = states(optimizer)
    assert {state.dtype for state in held} == {torch.float32} and len(held) == kept * len(SHAPES)
    assert sum(state.nbytes for state in held) == kept * sum(w.nbytes for w in start)
    zeros, slopes = [torch.zeros(4, 5)], numbers(1, 0.1, [(4, 5)], (STEPS,))
    seen, _ = stepped(make, zeros, slopes)  # weights of zero move
    assert seen[0][0].abs().min() > 0
    agrees(seen, paper, zeros, slopes, 1e-5)
    start = numbers(0, 1, [(4, 5)])  # and gradients of zero do no harm
    still, _ = stepped(make, start, [torch.zeros(3, 4, 5)])
    assert all(torch.equal(one[0], start[0]) for one in still)
