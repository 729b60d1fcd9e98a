"""What a GPU runs for an operation: FLOPs and bytes against arithmetic done by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from helpers import models
from helpers.plan import plan, plan_at
from helpers.recipe import Recipe
from tight_fit.kernels import describe, trace_ops
from tight_fit.kernels.op import PHASES
from tight_fit.kernels.trace_ops import TraceOps
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step
from tight_fit.trace.cuda_kernels import CudaKernels

HALF, SINGLE = 2, 4


def kernels(run):
    """The kernels of what `run` does, on real tensors."""
    with TraceOps() as ops:
        run()
    return [op for index, _ in ops.traced.order for op in ops.traced.ops[index]]


def only(found, kind):
    some = [op for op in found if op.kind == kind]
    assert len(some) == 1, found
    return some[0]


def test_linear_and_its_backward_pass_are_three_products():
    x, weight = torch.randn(6, 10, requires_grad=True), torch.randn(14, 10, requires_grad=True)
    found = kernels(lambda: F.linear(x, weight).square().sum().backward())
    found = [op for op in found if op.kind == "matmul"]
    assert [op.flops for op in found] == [2 * 6 * 10 * 14] * 3
    assert found[0].layout == "tn" and {op.layout for op in found[1:]} == {"nt", "nn"}
    assert found[0].shape == (1, 6, 14, 10)
    assert (found[0].read, found[0].written) == (SINGLE * (6 * 10 + 14 * 10), SINGLE * 6 * 14)


def test_grouped_products_are_those_of_each_expert():
    """Forward and backward, against PyTorch's own count of a loop over the experts."""
    x, weights = torch.randn(12, 8, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True)
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)

    def loop():
        parts = [rows @ weight for rows, weight in zip(x.split(4), weights)]
        torch.cat(parts).square().sum().backward()

    with FlopCounterMode(display=False) as counted:
        loop()
    found = kernels(lambda: F.grouped_mm(x, weights, offs=ends).square().sum().backward())
    grouped = [op for op in found if op.kind == "matmul"]
    assert sum(op.flops for op in grouped) == counted.get_total_flops()
    batched = [op for op in kernels(loop) if op.kind == "matmul"]
    assert {(3, *op.shape[1:]) for op in batched} >= {grouped[0].shape}
    assert all(op.flops == 2 * 3 * 4 * 8 * 4 for op in grouped)


@pytest.mark.parametrize("groups", (1, 2))
def test_convolution_is_a_product_of_pixels_and_taps(groups):
    layer = torch.nn.Conv2d(4, 6, 3, padding=1, groups=groups, bias=False)
    images = torch.randn(2, 4, 8, 8, requires_grad=True)
    found = [
        op for op in kernels(lambda: layer(images).sum().backward()) if op.kind == "convolution"
    ]
    flops = 2 * 2 * 8 * 8 * 6 * 4 // groups * 9
    assert [op.flops for op in found] == [flops] * 3
    for op in found:
        batch, m, n, k = op.shape
        assert 2 * batch * m * n * k == flops


def test_layer_norm_backward_is_two_kernels():
    x, norm = torch.randn(32, 64, requires_grad=True), torch.nn.LayerNorm(64)
    found = kernels(lambda: norm(x).square().sum().backward())
    found = [op for op in found if op.name == "native_layer_norm_backward"]
    assert [op.kind for op in found] == ["norm", "reduction"]
    assert found[0].read == 2 * SINGLE * 32 * 64 and found[0].shape == (32, 64)


def test_attention_keeps_its_scores_on_the_chip():
    query, key, value = (torch.randn(2, 3, 32, 8) for _ in range(3))

    def fused(**how):
        return kernels(lambda: F.scaled_dot_product_attention(query, key, value, **how))

    op, causal = (only(fused(is_causal=on), "attention") for on in (False, True))
    assert op.flops == 2 * 2 * 2 * 3 * 32 * 32 * 8 and op.shape == (6, 32, 32, 8)
    assert causal.flops == op.flops // 2, "half of the scores are masked"
    assert op.read == 3 * SINGLE * 2 * 3 * 32 * 8  # and no score


def test_a_fused_optimizer_reads_four_and_writes_three_numbers_a_parameter():
    weights = [torch.nn.Parameter(torch.zeros(100, 10)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    op = only(
        [op for op in kernels(optimizer.step) if op.name.startswith("_fused")], "multi_tensor"
    )
    steps = 3 * SINGLE  # each tensor's own count of steps
    assert op.read - steps == 4 * SINGLE * 3000 and op.kernels == 1
    assert op.written - op.read in (0, -steps)  # PyTorch declares the gradient as changed, too


LEFT, ROW, MATRIX = torch.randn(5, 3, 7), torch.randn(1, 16), torch.randn(8, 16)
ONE_BY_ONE = torch.nn.Conv2d(4, 4, 3, groups=4, bias=False)  # each channel by itself
SMALL = {  # {case: (what runs, the kind of its only kernel, fields by hand)}
    "a product of every batch": (
        lambda: LEFT @ torch.randn(5, 7, 4),
        "matmul",
        {"shape": (5, 3, 4, 7), "flops": 2 * 5 * 3 * 4 * 7},
    ),
    "a channel by itself": (
        lambda: ONE_BY_ONE(torch.randn(1, 4, 5, 5)),
        "depthwise",
        {"flops": 2 * 4 * 9 * 9},
    ),
    "fused dropout, whose mask has a byte an element": (
        lambda: torch.native_dropout(MATRIX, 0.1, True),
        "elementwise",
        {"read": SINGLE * 128, "written": SINGLE * 128 + 128},
    ),
    "an expanded operand, which is read once": (
        lambda: MATRIX + ROW.expand(8, 16),
        "elementwise",
        {"read": SINGLE * (128 + 16)},
    ),
    "many tensors, of which a launch takes 110": (
        lambda: torch._foreach_mul_([torch.zeros(4) for _ in range(250)], 2.0),
        "multi_tensor",
        {"kernels": 3},
    ),
    "asking for a value": (lambda: torch.ones(1).sum().item(), "wait", {}),
}


def test_views_launch_nothing():
    x = torch.randn(4, 6)
    assert kernels(lambda: x.view(6, 4).t().transpose(0, 1)[1:].detach()) == []


@pytest.mark.parametrize("case", SMALL)
def test_a_kernel_has_the_numbers_that_are_counted_by_hand(case):
    run, kind, fields = SMALL[case]
    op = only(kernels(run), kind)
    assert {name: getattr(op, name) for name in fields} == fields


def test_the_gradient_of_an_embedding_is_as_large_as_its_table():
    table = torch.nn.Embedding(1000, 16)
    ids = torch.zeros(4, 8, dtype=torch.long)
    op = only(kernels(lambda: table(ids).sum().backward()), "scatter")
    assert op.written >= SINGLE * 1000 * 16


RECIPES = {
    "deberta": Recipe(batch_size=8, length=32, checkpointing=True),
    "accumulated": Recipe(model="vit", batch_size=16, accumulation=8),
    "8 bits": Recipe(model="vit", batch_size=4, optimizer="adamw8bit"),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipes_flops_are_the_plans(recipe):
    traced, planned = plan(recipe).operations, plan(recipe).flops
    assert {name: traced.flops[name] for name in planned} == planned
    assert traced.flops["optimizer"] == 0
    if recipe.checkpointing:  # a recomputed forward pass is told from the backward pass
        assert 0.5 < traced.bytes["recompute"] / traced.bytes["forward"] <= 1


def test_a_step_of_ones_own_has_phases():
    def setup():
        model = torch.nn.Linear(32, 8)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step():
            model(torch.zeros(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return [model], step

    planned = plan_custom_step(setup)
    traced = planned.operations
    assert planned.seconds("T4").total > 0 and traced.bytes["optimizer"] > 0
    assert traced.flops["forward"] == traced.flops["backward"] == 2 * 16 * 32 * 8
    phases = {PHASES[phase] for _, phase in traced.order}
    assert phases == {"forward", "backward", "optimizer"}


def test_the_plans_operations_are_those_of_a_real_step():
    """Of all micro-batches, by phase: on real tensors every one is run, of the plan two."""
    recipe = Recipe(model="vit", batch_size=6, accumulation=3, precision="bf16")

    ops = TraceOps()
    with CudaKernels(recipe):
        model = models.build(recipe)
        optimizer = make_optimizer(model, recipe)
        config = model.config
        side = config.image_size
        batch = {
            "pixel_values": torch.randn(2, config.num_channels, side, side),
            "labels": torch.zeros(2, dtype=torch.long),
        }
        train_step(model, optimizer, [batch] * 3, 6, recipe)
        with ops:
            train_step(model, optimizer, [batch] * 3, 6, recipe, ops.phase)
    real, planned = ops.traced, plan(recipe).operations
    assert planned.again[2] == 1 and len(planned.issued()) == len(real.issued())
    assert planned.flops == real.flops and planned.bytes == real.bytes
    assert planned.counted() == real.counted()


def test_a_plan_without_operations_says_so():
    planned = plan(Recipe(model="vit", batch_size=8))
    for other in (plan(planned.recipe, "cpu"), plan_at(planned, batch_size=16)):
        with pytest.raises(ValueError, match="has no seconds"):
            other.seconds("T4")


def test_an_operation_that_cannot_be_described_stops_no_plan_of_memory(monkeypatch):
    def fails(*arguments):
        raise IndexError

    monkeypatch.setattr(trace_ops, "describe", fails)
    planned = plan(Recipe(model="vit", batch_size=4), change=lambda model: None)
    assert planned.peak == plan(Recipe(model="vit", batch_size=4)).peak
    with pytest.raises(ValueError, match="The time of the operation aten.* is not known"):
        planned.seconds("T4")


def test_a_gather_reads_its_rows_and_their_indices():
    words, indices = torch.randn(50, 8), torch.tensor([[1, 7, 7], [0, 49, 3]])
    op = only(kernels(lambda: F.embedding(indices, words)), "gather")
    rows = SINGLE * indices.numel() * 8
    assert (op.read, op.written) == (rows + 8 * indices.numel(), rows)


@pytest.mark.parametrize(
    "source, target, changes",
    [
        (torch.ones(4, 6), torch.ones(4, 6), False),
        (torch.ones(4, 6), torch.ones(6, 4).T, True),
        (torch.ones(4, 12)[:, ::2], torch.ones(4, 6), False),  # no axis without gaps
        (torch.ones(1, 1), torch.ones(1, 1), False),
        (torch.ones(6), torch.ones(6), False),
        (torch.ones(4, 6), torch.ones(6, 4), False),  # another shape is no copy of it
    ],
    ids=["alike", "transposed", "gaps", "one number", "one axis", "another shape"],
)
def test_a_copy_changes_the_layout_where_another_axis_lies_closest(source, target, changes):
    assert describe._changes_layout((target, source), target) == changes
