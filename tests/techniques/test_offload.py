"""What waits on the host comes back as it was, and each thing moves once."""

from collections import Counter
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import models, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.techniques import activation_offload, host
from tight_fit.techniques.activation_offload import OffloadedActivations
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import loss_sum, train_step

SMALL = {
    "deberta": Recipe(batch_size=8, length=32),
    "vit": Recipe(model="vit", batch_size=8),
}


def gradients(recipe: Recipe) -> dict[str, torch.Tensor]:
    model = models.build(recipe)
    batch = train.encoded(recipe)["train"].batch(range(8))
    torch.manual_seed(0)  # of dropout
    if recipe.offload == "activations":
        with OffloadedActivations(model):
            loss = loss_sum(model, batch, recipe)
    else:
        loss = loss_sum(model, batch, recipe)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "model, fields",
    [("deberta", {}), ("vit", {"checkpointing": True}), ("deberta", {"precision": "bf16"})],
    ids=str,
)
def test_activations_that_waited_give_the_same_gradients_bit_for_bit(model, fields):
    recipe = replace(SMALL[model], **fields)
    plain, moved = gradients(recipe), gradients(replace(recipe, offload="activations"))
    assert plain.keys() == moved.keys()
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


class Counting(activation_offload._Copies):
    """Copies that are counted, by the address on the host."""

    def __init__(self, device):
        super().__init__(device)
        self.moved = Counter()

    def to_host(self, flat):
        copy, event = super().to_host(flat)
        self.moved["to", copy.data_ptr()] += 1
        self.moved["kept", id(copy)] += 0
        held.append(copy)  # so that no address is used twice
        return copy, event

    def from_host(self, copy):
        self.moved["from", copy.data_ptr()] += 1
        return super().from_host(copy)


held: list[torch.Tensor] = []


def test_each_storage_moves_once_each_way_and_weights_never(monkeypatch):
    monkeypatch.setattr(activation_offload, "_Copies", Counting)
    recipe = SMALL["vit"]
    model = models.build(recipe)
    weights = {parameter.nbytes for parameter in model.parameters() if parameter.dim() == 2}
    batch = train.encoded(recipe)["train"].batch(range(8))
    with OffloadedActivations(model) as offloaded:
        loss = loss_sum(model, batch, recipe)
    loss.backward()
    ways = Counter(way for way, _ in offloaded.copies.moved.elements())
    assert set(offloaded.copies.moved.values()) <= {0, 1}
    assert ways["to"] == ways["from"] == len(offloaded.order) > 20
    assert not weights & {copy.nbytes for copy in held}
    held.clear()
    assert all(reference() is None for reference in offloaded.order), "nothing is left"


class Watching(activation_offload._Copies):
    """Counts how many copies from the host had begun each time that one was waited for."""

    def __init__(self, device):
        super().__init__(device)
        self.seen: list[int] = []

    def wait(self, event, direction):
        if direction == 1:
            self.seen.append(self.begun[1])
        super().wait(event, direction)


def test_the_next_two_are_under_way_while_one_is_waited_for(monkeypatch):
    monkeypatch.setattr(activation_offload, "_Copies", Watching)
    x, model = torch.randn(64, 256, requires_grad=True), torch.nn.Linear(1, 1)
    with OffloadedActivations(model) as offloaded:
        y = x
        for _ in range(6):
            y = y.tanh()
        y = y.sum()
    y.backward()
    moved, waits = len(offloaded.order), list(dict.fromkeys(offloaded.copies.seen))
    assert moved == 6 and waits == [3, 4, 5, 6]  # then nothing is left to begin


class Blocking(TorchDispatchMode):
    """The copies that the program waits for."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            _, _, lets_go_on = (*args, *(kwargs or {}).values(), False)[:3]
            self.copies.append(not lets_go_on)
        return func(*args, **(kwargs or {}))


def test_a_copy_on_a_stream_of_its_own_is_not_waited_for(monkeypatch):
    """PyTorch waits for the end of each copy that is not told otherwise, and nothing overlaps."""
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    copies, there = activation_offload._Copies(torch.device("cpu")), torch.randn(9)
    copies.streams = MagicMock(), MagicMock()
    with Blocking() as waited:
        back, _ = copies.from_host(there)
    assert waited.copies == [False] and torch.equal(back, there)


def test_views_of_one_storage_come_back_as_views_of_one():
    x = torch.randn(64, 256, requires_grad=True)
    y = torch.randn(64, 256)
    with OffloadedActivations(torch.nn.Linear(1, 1)):
        doubled = x * 2
        loss = (doubled[:, :128] * doubled[:, 128:] * y[:, :128]).sum() + doubled.exp().sum()
    loss.backward()
    offloaded_gradient, x.grad = x.grad, None
    doubled = x * 2
    ((doubled[:, :128] * doubled[:, 128:] * y[:, :128]).sum() + doubled.exp().sum()).backward()
    assert torch.equal(offloaded_gradient, x.grad)


def test_an_address_that_is_used_again_is_another_tensor():
    """Storages die while the forward pass goes on, and later ones get their addresses."""
    x = torch.randn(100, 128, requires_grad=True)

    def loss(x):
        for number in range(20):
            x = torch.tanh(x * (number + 1)).sin()
        return x.sum()

    with OffloadedActivations(torch.nn.Linear(1, 1)):
        value = loss(x)
    value.backward()
    moved, x.grad = x.grad, None
    loss(x).backward()
    assert torch.equal(moved, x.grad)


def fitted(recipe: Recipe, **others) -> dict[str, torch.Tensor]:
    return train.fit(recipe, progress=False, **others).model.state_dict()


@pytest.mark.parametrize("fields", [{}, {"optimizer": "sgd", "lora_rank": 2}], ids=str)
def test_an_optimizer_on_the_host_gives_the_same_weights_bit_for_bit(fields):
    recipe = replace(SMALL["vit"], steps=4, train_size=64, **fields)
    plain, moved = fitted(recipe), fitted(replace(recipe, offload="optimizer"))
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


def test_the_host_copy_follows_weights_that_somebody_changes():
    recipe = replace(SMALL["vit"], offload="optimizer")
    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    batch = train.encoded(recipe)["train"].batch(range(8))
    train_step(model, optimizer, [batch], 8, recipe)
    with torch.no_grad():
        model.classifier.bias.fill_(7.0)
    train_step(model, optimizer, [batch], 8, recipe)
    assert (model.classifier.bias > 6.9).all()


def test_what_is_on_the_host_is_not_on_the_gpu():
    recipe = SMALL["vit"]
    plain, optimizer, activations = (
        plan(replace(recipe, offload=offload)) for offload in (None, *("optimizer", "activations"))
    )
    assert plain.host == 0
    assert optimizer.at_peak["optimizer states"] == 0
    weights = 4 * plain.parameters
    assert optimizer.host >= 4 * weights  # a copy, its gradient, and two states
    assert plain.peak - optimizer.peak == pytest.approx(2 * weights, rel=0.02)
    assert activations.highest["activations"] < plain.highest["activations"] / 3
    assert activations.host > plain.highest["activations"] / 3


def test_a_plan_copies_each_gradient_to_the_host_and_each_weight_back():
    planned = plan(replace(SMALL["vit"], offload="optimizer"))
    moved = Counter()
    for index, _ in planned.operations.order:
        for op in planned.operations.ops[index]:
            moved[op.kind] += op.written
    assert moved["to host"] == moved["from host"] == 4 * planned.parameters


def test_paged_states_are_the_drivers_and_small_ones_the_gpus():
    recipe = Recipe(batch_size=4, length=16)
    eight, paged = (
        plan(replace(recipe, optimizer=name)) for name in ("adamw8bit", "paged_adamw8bit")
    )
    left = paged.at_peak["optimizer states"]
    assert 0 < left < eight.at_peak["optimizer states"] / 2
    large = [p.numel() for p in models.build(recipe).parameters() if p.numel() >= 100_000]
    assert paged.host == 2 * sum(large)


def test_an_error_ends_what_lies_on_the_host():
    with pytest.raises(KeyError), host.on_host():
        raise KeyError
    assert not host.is_active(), "else all that is planned afterwards is the host's"


@pytest.mark.parametrize("numbers, waits", [(2**13 - 1, False), (2**13, True)])
def test_what_is_smaller_than_32_kib_stays(numbers, waits, monkeypatch):
    """A copy of less takes longer to begin than to make."""
    monkeypatch.setattr(activation_offload, "_Copies", Counting)
    monkeypatch.setattr("tests.techniques.test_offload.held", [])
    x = torch.ones(numbers, requires_grad=True)  # of 4 bytes
    model = torch.nn.Linear(1, 1)  # what it holds is told by its storages, which must live
    with OffloadedActivations(model) as offloaded:
        y = (x * 2).exp()
    y.sum().backward()
    assert bool(offloaded.copies.moved) == waits and torch.equal(x.grad, 2 * y.detach())
