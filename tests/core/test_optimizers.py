"""The optimizers of a recipe: what each keeps, and that each computes what its paper says."""

import gc
import math
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from helpers import models, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.night import few_by_day
from tight_fit import packages
from tight_fit.optimizer_kinds import ADAMW, KINDS, OPTIMIZERS
from tight_fit.techniques.optimizers import make_optimizer, make_scaler, states
from tight_fit.techniques.step import loss_sum
from tight_fit.trace.storage_trace import PHASES, TEMPORARIES

SMALL = 4096  # elements under which bitsandbytes keeps fp32 states
BLOCK = 256
MAPS = 2 * 256 * 4  # bytes of the two maps, signed and unsigned, that all 8-bit states share


def recipe(model="vit", **fields):
    more = {"length": 32} if model == "deberta" else {}
    if fields.get("optimizer") == "adamw_stochastic":
        more["base"] = "bf16"
    return Recipe(model, batch_size=8, train_size=64, **more, **fields)


def gradients(net, wanted, first=0):
    """The mini model's real gradients, on eight real rows."""
    net.zero_grad()
    batch = train.encoded(wanted)["train"].batch(range(first, first + 8))
    (loss_sum(net, batch, wanted) / 8).backward()
    return [p.grad.clone() for p in net.parameters()]


def stepped(name):
    wanted = recipe("deberta", optimizer=name)
    net = models.build(wanted)
    optimizer = make_optimizer(net, wanted)
    gradients(net, wanted)
    optimizer.step()
    return net, optimizer


def embeddings(net):
    return {id(module.weight) for module in net.modules() if isinstance(module, nn.Embedding)}


def quantised(counts, moments):
    """{dtype: bytes}: a byte per element and a scale per block, and fp32 for small tensors."""
    large, small = [n for n in counts if n >= SMALL], sum(n for n in counts if n < SMALL)
    scales = sum(-(-n // BLOCK) for n in large)
    fp32 = moments * 4 * (scales + small) + MAPS // 2 * moments
    return {torch.uint8: moments * sum(large), torch.float32: fp32}


def factored(shape):
    """Numbers that Adafactor keeps: a row and a column of a matrix, and a count of steps."""
    count = shape.numel()
    return 1 + (count // shape[-1] + count // shape[-2] if len(shape) > 1 else count)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_state_by_dtype_follow_from_the_shapes(name):
    net, optimizer = stepped(name)
    found = {id(value): value for value in states(optimizer, make_scaler(recipe(), "cpu"))}
    sizes = {}
    for value in found.values():
        sizes[value.dtype] = sizes.get(value.dtype, 0) + value.nbytes

    shapes = [p.shape for p in net.parameters()]
    counts = [shape.numel() for shape in shapes]
    held = embeddings(net)
    tables = sum(p.numel() for p in net.parameters() if id(p) in held)
    others = quantised([p.numel() for p in net.parameters() if id(p) not in held], 2)
    base = getattr(net, net.base_model_prefix).parameters()
    matrices = [p.numel() for p in base if p.ndim == 2 and id(p) not in held]
    everything, fp32 = sum(counts), torch.float32
    by_adamw = 4 * (everything - sum(matrices)) + 4 * (len(counts) - len(matrices))  # Muon's rest
    expected = {
        **{name: {fp32: 8 * everything + 4 * len(counts)} for name in ADAMW},  # and step counters
        "sgd": {fp32: 4 * everything},
        "lion": {fp32: 4 * everything},
        "lion8bit": quantised(counts, 1),
        "adamw8bit": quantised(counts, 2),
        "paged_adamw8bit": quantised(counts, 2),  # nothing is paged on a CPU
        "adamw8bit_embed32": {**others, fp32: others[fp32] + 8 * tables},
        "adamw_stochastic": {torch.bfloat16: 4 * everything},
        "adafactor": {fp32: 4 * sum(map(factored, shapes))},
        "muon": {fp32: 4 * everything + by_adamw},
    }
    assert sizes == expected[name]


@pytest.mark.parametrize("name, copies", [("adamw", 0), ("sgd", 0), ("adamw_foreach", 1)])
def test_an_update_makes_no_tensors_by_one_fused_kernel_and_a_root_by_foreach(name, copies):
    """Of AdamW's second moments; then its counters of steps are on the host."""
    wanted = recipe(optimizer=name, weight_decay=0.1, max_grad_norm=None)
    planned = plan(wanted, "cuda")
    update = planned.timeline[planned.phases == PHASES.index("optimizer")]
    weights = [p.nbytes for p in models.build(wanted).parameters()]
    assert np.ptp(update[:, TEMPORARIES]) == copies * sum(-(-n // 512) * 512 for n in weights)
    kernels = planned.operations
    read = [op.read for at, phase in kernels.issued() if phase == 3 for op in kernels.ops[at]]
    counters = [4 * len(weights)] if name == "adamw" else []  # a fused kernel reads them there
    assert [count for count in read if count < sum(weights)] == counters


def test_neither_embed32_nor_an_override_in_the_librarys_manager_reaches_another_optimizer():
    from bitsandbytes.optim import GlobalOptimManager

    def all_8_bit():
        net, optimizer = stepped("adamw8bit")
        large = [p for p in net.parameters() if p.numel() >= SMALL]
        return {optimizer.state[p]["state1"].dtype for p in large} == {torch.uint8}

    stepped("adamw8bit_embed32")
    shared = GlobalOptimManager.get_instance()
    assert not (shared.index2config or shared.pid2config or shared.module_weight_config_triple)
    assert all_8_bit()
    try:
        shared.index2config[(0, 0)] = {"optim_bits": 32}
        assert all_8_bit()
    finally:
        shared.initialize()


@pytest.mark.parametrize("name", few_by_day(["adamw8bit_embed32", "adamw", "muon"], 3))
def test_a_deleted_model_is_gone(name):
    net, optimizer = stepped(name)
    words = net.deberta.embeddings.word_embeddings
    ghosts = [weakref.ref(net), weakref.ref(words), weakref.ref(next(net.parameters()))]
    del net, optimizer, words
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 3


def test_a_missing_package_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    net = nn.Linear(4, 4).to(torch.bfloat16)
    for name in OPTIMIZERS:
        if not KINDS[name].package:
            make_optimizer(net, recipe(optimizer=name))
            continue
        with pytest.raises(ModuleNotFoundError, match="run `pip install bitsandbytes`") as caught:
            make_optimizer(net, recipe(optimizer=name))
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(packages, "missing", lambda *modules: list(modules))
    with pytest.raises(ModuleNotFoundError, match="run `pip install peft`"):
        models.build(recipe(lora_rank=2))


def paths(name, model, reference=None):
    """Six steps of an optimizer on real gradients beside a reference that sees the same ones:
    [(parameter there, parameter at the reference, how far the reference came)]."""
    wanted = recipe(model, optimizer=name, learning_rate=1e-3, weight_decay=0.1)
    lead, follower = models.build(wanted), models.build(wanted)
    begin = [p.detach().clone() for p in lead.parameters()]
    optimizer = make_optimizer(follower, wanted)
    rule = reference or make_optimizer(lead, replace(wanted, optimizer="adamw"))
    memory = [{} for _ in begin]
    for step in range(1, 7):
        grads = gradients(lead, wanted, 8 * (step - 1))
        for p, grad in zip(follower.parameters(), grads):
            p.grad = grad.clone()
        optimizer.step()
        if reference is None:
            rule.step()
            continue
        with torch.no_grad():
            for p, grad, state in zip(lead.parameters(), grads, memory):
                p.copy_(rule(p, grad, state, step, wanted.peak_learning_rate, wanted.weight_decay))
    return [
        (ours.detach(), theirs.detach(), (theirs.detach() - first).norm().item())
        for ours, theirs, first in zip(follower.parameters(), lead.parameters(), begin)
    ]


@pytest.mark.parametrize("name", ["adamw8bit", "adamw8bit_embed32"])
def test_8_bit_adamw_goes_adamws_way_on_real_gradients_and_32_bit_embeddings_exactly(name):
    net = models.build(recipe("deberta"))
    tables = [id(p) in embeddings(net) for p in net.parameters()]
    exact, near = [], []
    for (ours, theirs, way), is_table in zip(paths(name, "deberta"), tables):
        in_32_bits = ours.numel() < SMALL or (is_table and name.endswith("embed32"))
        (exact if in_32_bits else near).append((ours - theirs).norm().item() / way)
    assert max(exact) < 1e-3
    assert 1e-4 < max(near) < 0.1, "quantised: near, and not the same"


def sgd(p, grad, state, step, rate, decay):
    """Momentum as in PyTorch: the first step is the gradient, which includes weight decay."""
    grad = grad + decay * p
    state["b"] = 0.9 * state["b"] + grad if "b" in state else grad
    return p - rate * state["b"]


def lion(p, grad, state, step, rate, decay):
    """Chen et al. 2023, algorithm 2: the sign of momentum mixed with gradient; decoupled decay."""
    m = state.get("m", torch.zeros_like(p))
    direction = torch.sign(0.9 * m + 0.1 * grad)
    state["m"] = 0.99 * m + 0.01 * grad
    return p - rate * (direction + decay * p)


def adafactor(p, grad, state, step, rate, decay):
    """Shazeer and Stern 2018, algorithms 4 and 5: factored second moments, clipped to d=1,
    relative steps, no momentum."""
    beta = 1 - step**-0.8
    rho = min(rate, 1 / math.sqrt(step))
    alpha = max(1e-3, (p.norm() / p.numel() ** 0.5).item()) * rho
    p = p * (1 - rate * decay)
    square = grad**2
    if p.ndim > 1:
        row, column = square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)
        state["r"] = beta * state.get("r", 0) + (1 - beta) * row
        state["c"] = beta * state.get("c", 0) + (1 - beta) * column
        least = torch.finfo(p.dtype).eps
        v = state["r"] * state["c"] / state["r"].mean(-2, keepdim=True).clamp(min=least)
    else:
        state["v"] = beta * state.get("v", 0) + (1 - beta) * square
        v = state["v"]
    u = grad / v.clamp(min=torch.finfo(p.dtype).eps ** 2).sqrt()
    return p - alpha * u / max(1.0, (u.norm() / u.numel() ** 0.5).item())


def adamw(p, grad, state, step, rate, decay):
    """Loshchilov and Hutter 2017, algorithm 2."""
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * grad
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * grad**2
    m, v = state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.999**step)
    return p - rate * (m / (v.sqrt() + 1e-8) + decay * p)


@pytest.mark.parametrize("rule", [adamw, sgd, lion, adafactor], ids=lambda rule: rule.__name__)
def test_the_update_is_the_papers(rule):
    for ours, theirs, way in paths(rule.__name__, "vit", reference=rule):
        assert way > 0
        if rule is lion:  # the sign of a sum near zero may go either way
            assert ((ours - theirs).abs() > 1e-6).float().mean() < 1e-3
        else:
            assert (ours - theirs).norm().item() < 2e-3 * way
