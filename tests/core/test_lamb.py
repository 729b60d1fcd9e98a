"""LARS and LAMB, of lab 17's cells and of the sweeps, against the papers' algorithms in NumPy."""

import math
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from benchmarks.sweeps import layerwise
from tight_fit.techniques.optimizers import states

LABS = Path(__file__).parents[2] / "notebooks" / "labs"
NOTEBOOK = LABS / "17_large_batch_lamb_lab.ipynb"
STEPS, RATE = 6, 0.01
SHAPES = (64, 96), (7,), (3, 4, 5), (1,)


def from_notebook(name):
    """The class of that name, from the first cell of the lab that begins with it."""
    cells = [
        cell.source
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells
        if cell.cell_type == "code" and cell.source.startswith(f"class {name}(")
    ]
    assert cells, f"the lab defines no {name} at the head of a cell"
    scope = {"torch": torch}
    exec(compile(cells[0], f"{NOTEBOOK.name}:{name}", "exec"), scope)
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
OPTIMIZERS = [
    pytest.param(Lamb, lamb_2020, 2, id="Lamb of the lab"),
    pytest.param(Lars, lars_2017, 1, id="Lars of the lab"),
    pytest.param(layerwise.Lamb, lamb_2020, 2, id="Lamb of the sweeps"),
    pytest.param(layerwise.Lars, lars_2017, 1, id="Lars of the sweeps"),
]
EACH = pytest.mark.parametrize("make, paper, kept", OPTIMIZERS)
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


def stepped(make, start, slopes, again=lambda optimizer, step: optimizer, **settings):
    """The weights after each step of one optimizer of them all, and that optimizer."""
    weights = [torch.nn.Parameter(w.clone()) for w in start]
    optimizer, seen = make(weights, lr=RATE, **settings), []
    for step in range(len(slopes[0])):
        optimizer = again(optimizer, step)
        for w, g in zip(weights, slopes):
            w.grad = g[step].clone()
        optimizer.step()
        seen.append([w.detach().clone() for w in weights])
    return seen, optimizer


def agrees(seen, paper, start, slopes, within, **settings):
    """Assert that each weight went the paper's way, by itself, in double precision."""
    for number, (w, g) in enumerate(zip(start, slopes)):
        truth = paper(w.double().numpy(), g.double().numpy(), **settings)
        for step, (now, there) in enumerate(zip(seen, truth, strict=True)):
            there = torch.as_tensor(there)
            apart = ((now[number].double() - there).norm() / (there.norm() or 1)).item()
            assert apart < within, f"weight {number} is {apart:.1e} off after step {step}"


@EACH
def test_each_weight_goes_the_papers_way(make, paper, kept):
    start, slopes = numbers(0, 0.5), numbers(1, 0.1, steps=(STEPS,))
    given = [{}, *SETTINGS[paper]] if make in (Lamb, Lars) else [{"weight_decay": 0.1}]
    for settings in given:
        seen, _ = stepped(make, start, slopes, **settings)
        agrees(seen, paper, start, slopes, 3e-6, **settings)


@EACH
def test_zeros_move_and_zero_gradients_do_no_harm(make, paper, kept):
    zeros, slopes = [torch.zeros(4, 5)], numbers(1, 0.1, [(4, 5)], (STEPS,))
    seen, _ = stepped(make, zeros, slopes)
    assert seen[0][0].abs().min() > 0
    agrees(seen, paper, zeros, slopes, 1e-5)
    start = numbers(0, 1, [(4, 5)])
    still, _ = stepped(make, start, [torch.zeros(3, 4, 5)])
    assert all(torch.equal(one[0], start[0]) for one in still)


def test_a_step_of_lamb_is_a_set_share_of_the_weights_whatever_the_gradients_scale():
    start = numbers(0, 0.05, [(64, 96)])
    small, large = (
        stepped(Lamb, start, numbers(1, scale, [(64, 96)], (STEPS,)), eps=0.0)[0]
        for scale in (1e-4, 1e4)
    )
    torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-7)
    for (before,), (after,) in zip([start, *small], small):
        assert math.isclose((after - before).norm() / before.norm(), RATE, rel_tol=1e-4)


@EACH
def test_states_are_fp32_tensors_of_the_weights_size_and_survive_saving(make, paper, kept):
    def saved_half_way(optimizer, step):
        if step != 3:
            return optimizer
        (group,) = optimizer.param_groups
        loaded = make([*group["params"], torch.nn.Parameter(torch.ones(3))], lr=RATE)
        held = optimizer.state_dict()
        held["param_groups"][0]["params"].append(len(SHAPES))
        loaded.load_state_dict(held)
        return loaded  # with a weight more, which has no gradient

    start, slopes = numbers(0, 0.05), numbers(1, 0.1, steps=(STEPS,))
    whole, optimizer = stepped(make, start, slopes)
    again, loaded = stepped(make, start, slopes, saved_half_way)
    assert all(map(torch.equal, whole[-1], again[-1]))
    assert torch.equal(loaded.param_groups[0]["params"][-1], torch.ones(3))
    held = states(loaded)
    assert {state.dtype for state in held} == {torch.float32} and len(held) == kept * len(SHAPES)
    assert sum(state.nbytes for state in held) == kept * sum(w.nbytes for w in start)
