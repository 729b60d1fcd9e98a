"""The LARS and LAMB of lab 17, taken from its cells, against the papers' algorithms in NumPy."""

import math
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from benchmarks.sweeps import layerwise
from helpers import models, train
from helpers.recipe import Recipe
from tight_fit.techniques.optimizers import states
from tight_fit.techniques.step import loss_sum

LABS = Path(__file__).parents[2] / "notebooks" / "labs"
NOTEBOOK = LABS / "17_large_batch_lamb_lab.ipynb"
STEPS, RATE = 6, 0.01


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


Lars, Lamb = from_notebook("Lars"), from_notebook("Lamb")


def weights(scale=0.05, shape=(64, 96)):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def gradients(shape=(64, 96), steps=STEPS, scale=0.1):
    return list(scale * torch.randn(steps, *shape, generator=torch.Generator().manual_seed(1)))


def stepped(make, start, slopes, rate=None, **settings):
    """The parameter after each step."""
    w = torch.nn.Parameter(start.clone())
    optimizer, seen = make([w], lr=RATE, **settings), []
    for t, g in enumerate(slopes, 1):
        if rate:
            optimizer.param_groups[0]["lr"] = rate(t)
        w.grad = g.clone()
        optimizer.step()
        seen.append(w.detach().clone())
    return seen


def apart(one, other):
    other = torch.as_tensor(other, dtype=torch.float64)
    return ((one.double() - other).norm() / (other.norm() or 1)).item()


# -- the papers, in double precision ---------------------------------------------------------------


def lamb_2020(x, slopes, decay=0.0, low=0.0, high=10.0, beta1=0.9, beta2=0.999, eps=1e-6, eta=RATE):
    """You et al. 2020, Algorithm 2, phi(z) = min(max(z, low), high); ratio 1 where a norm is 0."""
    m, v, seen = np.zeros_like(x), np.zeros_like(x), []
    for t, g in enumerate(slopes, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * np.square(g)
        r = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        u = r + decay * x
        norms = np.linalg.norm(x), np.linalg.norm(u)
        x = x - eta * (min(max(norms[0], low), high) / norms[1] if min(norms) > 0 else 1.0) * u
        seen.append(x)
    return seen


def lars_2017(w, slopes, decay=0.0, momentum=0.9, trust=0.001, gamma=RATE):
    """You et al. 2017, Algorithm 1; a local rate of 1 where a norm is zero."""
    v, seen = np.zeros_like(w), []
    for g in slopes:
        norms = np.linalg.norm(w), np.linalg.norm(g)
        local = trust * norms[0] / (norms[1] + decay * norms[0]) if min(norms) > 0 else 1.0
        v = momentum * v + gamma * local * (g + decay * w)
        w = w - v
        seen.append(w)
    return seen


def numbers(tensors):
    return [tensor.double().numpy() for tensor in tensors]


def agrees(actual, truth, within=1e-6):
    errors = [apart(one, other) for one, other in zip(actual, truth, strict=True)]
    assert max(errors) < within, errors


SHAPES = pytest.mark.parametrize("shape", [(64, 96), (7,), (3, 4, 5), (1,)])


@SHAPES
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1},
        {"high": 0.5, "weight_decay": 0.1},
        {"low": 20.0, "high": 1e9},
        {"betas": (0.5, 0.9), "eps": 1e-3},
    ],
)
def test_lamb_is_the_papers(shape, settings):
    start, slopes = weights(0.5, shape), gradients(shape)
    beta1, beta2 = settings.get("betas", (0.9, 0.999))
    truth = lamb_2020(
        start.double().numpy(),
        numbers(slopes),
        settings.get("weight_decay", 0.0),
        settings.get("low", 0.0),
        settings.get("high", 10.0),
        beta1,
        beta2,
        settings.get("eps", 1e-6),
    )
    agrees(stepped(Lamb, start, slopes, **settings), truth, 3e-6)


@SHAPES
@pytest.mark.parametrize(
    "settings", [{}, {"weight_decay": 0.1}, {"momentum": 0.0}, {"trust": 0.5, "weight_decay": 0.01}]
)
def test_lars_is_the_papers(shape, settings):
    start, slopes = weights(0.5, shape), gradients(shape)
    truth = lars_2017(
        start.double().numpy(),
        numbers(slopes),
        settings.get("weight_decay", 0.0),
        settings.get("momentum", 0.9),
        settings.get("trust", 0.001),
    )
    agrees(stepped(Lars, start, slopes, **settings), truth)


OF_THE_SWEEPS = [(layerwise.Lamb, lamb_2020), (layerwise.Lars, lars_2017)]


@pytest.mark.parametrize("make, reference", OF_THE_SWEEPS)
def test_those_of_the_sweeps_are_the_papers_too(make, reference):
    truth = reference(weights().double().numpy(), numbers(gradients()), 0.1)
    agrees(stepped(make, weights(), gradients(), weight_decay=0.1), truth, 3e-6)


@pytest.mark.parametrize("make, reference", [(Lamb, lamb_2020), (Lars, lars_2017), *OF_THE_SWEEPS])
def test_zeros_move_and_zero_gradients_do_no_harm(make, reference):
    zeros, slopes = torch.zeros(4, 5), gradients((4, 5))
    actual = stepped(make, zeros, slopes)
    assert actual[0].abs().min() > 0
    agrees(actual, reference(zeros.double().numpy(), numbers(slopes)), 1e-5)
    still = stepped(make, weights(1, (4, 5)), [torch.zeros(4, 5)] * 3)
    assert all(torch.equal(one, weights(1, (4, 5))) for one in still)


def test_a_step_of_lamb_is_a_set_share_of_the_weights_whatever_the_gradients_scale():
    small, large = (
        stepped(Lamb, weights(), gradients(scale=scale), eps=0.0) for scale in (1e-4, 1e4)
    )
    agrees(small, large)
    path = [weights(), *small]
    assert all(
        math.isclose((b - a).norm() / a.norm(), RATE, rel_tol=1e-4) for a, b in zip(path, path[1:])
    )


@pytest.mark.parametrize("make, count", [(Lamb, 2), (Lars, 1)])
def test_states_are_fp32_tensors_of_the_weights_size_and_survive_saving(make, count):
    start, slopes = weights(), gradients()
    w = torch.nn.Parameter(start.clone())
    untouched = torch.nn.Parameter(torch.ones(3))  # has no gradient
    optimizer = make([w, untouched], lr=RATE)
    for place, g in enumerate(slopes):
        if place == 3:  # saved and loaded half way
            saved = optimizer.state_dict()
            optimizer = make([w, untouched], lr=RATE)
            optimizer.load_state_dict(saved)
        w.grad = g.clone()
        optimizer.step()
    assert torch.equal(w, stepped(make, start, slopes)[-1]) and torch.equal(
        untouched, torch.ones(3)
    )
    assert [state.dtype for state in states(optimizer)] == [torch.float32] * count
    assert sum(state.nbytes for state in states(optimizer)) == count * w.nbytes


def test_lamb_on_the_mini_vit_with_real_gradients():
    recipe = Recipe("vit", train_size=64, batch_size=16)
    rows, model = train.encoded(recipe)["train"], models.build(recipe).eval()
    before = {name: w.detach().double().numpy() for name, w in model.named_parameters()}
    optimizer, seen = (
        Lamb(model.parameters(), lr=RATE, weight_decay=0.01),
        {name: [] for name in before},
    )
    for step in range(3):
        optimizer.zero_grad()
        (loss_sum(model, rows.batch(range(16 * step, 16 * step + 16)), recipe) / 16).backward()
        for name, w in model.named_parameters():
            seen[name].append(w.grad.double().numpy())
        optimizer.step()
    for name, w in model.named_parameters():
        assert apart(w.detach(), lamb_2020(before[name], seen[name], 0.01)[-1]) < 1e-5, name
