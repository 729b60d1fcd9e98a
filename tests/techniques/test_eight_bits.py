"""Products in FP8: beside torchao's, beside the formula, on GPUs that have them and have not."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM

from helpers import models
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.small import configured
from tight_fit.gpus import KNOWN
from tight_fit.kernels.step_seconds import seconds
from tight_fit.kernels.trace_ops import TraceOps
from tight_fit.plans.model import plan_model
from tight_fit.techniques import eight_bits
from tight_fit.techniques.rules import SCALINGS
from tight_fit.trace.fake_mode import FakeTensorMode

SMALL = configured(
    LlamaConfig, 64, 2, 4, 128, 96, num_key_value_heads=2, max_position_embeddings=64
)
CHAT = Recipe(model="decoder", batch_size=4, length=32)


class Two(nn.Module):
    """Two linear layers, one with a bias, in a list as a model's layers are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 48), nn.Linear(48, 32, bias=False)])

    def forward(self, x):
        return self.layers[1](torch.relu(self.layers[0](x)))


def step(model, x, autocast):
    """The output, the gradient of the input, and those of the parameters."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_outputs_and_gradients_are_torchaos_bit_for_bit(scaling, autocast):
    pytest.importorskip("torchao", minversion="0.16")
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    own = Two() if autocast else Two().bfloat16()
    theirs = copy.deepcopy(own)
    eight_bits.multiply_in_8_bits(own, scaling)
    config = float8.Float8LinearConfig.from_recipe_name(scaling)
    float8.convert_to_float8_training(theirs, config=config)
    x = torch.randn(4, 16, 64, dtype=torch.bfloat16)
    for mine, library in zip(step(own, x, autocast), step(theirs, x, autocast), strict=True):
        assert torch.equal(mine, library)


@pytest.mark.parametrize("taken_apart", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_a_compiler_gets_computes_the_same_bit_for_bit(scaling, taken_apart, monkeypatch):
    torch.manual_seed(0)
    model, x = Two().bfloat16(), torch.randn(4, 16, 64, dtype=torch.bfloat16)
    eight_bits.multiply_in_8_bits(model, scaling)
    wanted = step(copy.deepcopy(model), x, False)
    monkeypatch.setattr(eight_bits.Product8bit, "apply", eight_bits.whole_product)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: taken_apart)
    for got, want in zip(step(model, x, False), wanted, strict=True):
        assert torch.equal(got, want)


def test_what_is_kept_is_what_torchao_keeps_and_four_scales_a_layer():
    pytest.importorskip("torchao", minversion="0.16")
    float8 = pytest.importorskip("torchao.float8")
    kept = []
    for change in (
        lambda model: eight_bits.multiply_in_8_bits(model, "tensorwise"),
        lambda model: float8.convert_to_float8_training(model),
    ):
        model = Two()
        change(model)
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, shapes=shapes: shapes.append((*tensor.shape, tensor.dtype)),
            lambda nothing: nothing,
        ):
            model(torch.randn(16, 64))
        kept.append(shapes)
    scale = (torch.float32,)
    assert [shape for shape in kept[0] if shape != scale] == kept[1]
    assert kept[0].count(scale) == 2 * 4


def by_formula(x, weight, gradient, scaling):
    """The three products of a layer in fp64, their operands rounded to 8 bits."""
    low = torch.float8_e5m2 if scaling == "tensorwise" else torch.float8_e4m3fn

    def rounded(numbers, axis, dtype=torch.float8_e4m3fn):
        most = numbers.abs().amax(axis, keepdim=True) if axis is not None else numbers.abs().max()
        scale = (torch.finfo(dtype).max / most.double()).float()
        scale = 2 ** scale.log2().floor() if axis is not None else scale
        return (numbers.float() * scale).to(dtype).double() / scale.double()

    def axis(which):
        return which if scaling == "rowwise" else None

    return (
        rounded(x, axis(1)) @ rounded(weight, axis(1)).T,
        rounded(gradient, axis(1), low) @ rounded(weight, axis(0)),
        rounded(gradient, axis(0), low).T @ rounded(x, axis(0)),
    )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_three_products_are_those_of_operands_rounded_to_8_bits(scaling):
    torch.manual_seed(0)
    layer = nn.ModuleList([nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)])
    model = nn.Module()
    model.layers = layer
    weight = layer[0].weight.detach()
    eight_bits.multiply_in_8_bits(model, scaling)
    x = (torch.randn(32, 64) * torch.linspace(0.01, 9, 32)[:, None]).bfloat16().requires_grad_()
    gradient = torch.randn(32, 48).bfloat16()
    y = model.layers[0](x)
    y.backward(gradient)
    wanted = by_formula(x.detach(), weight, gradient, scaling)
    for got, want in zip((y.detach(), x.grad, model.layers[0].weight.grad), wanted, strict=True):
        assert (got.double() - want).abs().max() < 2**-8 * want.abs().max()  # bf16's rounding
    exact = x.detach().double() @ weight.double().T
    assert not torch.allclose(y.double(), exact, rtol=2**-8)  # 8 bits are seen


def test_zeros_have_a_finite_scale():
    scale, inverse = eight_bits.scales(torch.zeros(4, 4), torch.float8_e4m3fn)
    assert scale.isfinite() and inverse.isfinite()
    assert not eight_bits.cast(torch.zeros(4, 4), scale).float().any()


def test_layers_of_the_stack_and_nothing_else():
    model = LlamaForCausalLM(SMALL)
    found = eight_bits.layers_of(model)
    assert len(found) == 2 * 7 and "lm_head" not in found
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 100)  # no multiple of 16
    assert len(eight_bits.layers_of(model)) == 2 * 7 - 1
    before = dict(model.named_parameters())
    eight_bits.multiply_in_8_bits(model, "rowwise")
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in after)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="leave float8 out"):
        eight_bits.multiply_in_8_bits(nn.Sequential(nn.Linear(16, 16)), "tensorwise")


def test_rows_that_a_gpu_does_not_take_are_refused():
    with pytest.raises(ValueError, match="30 rows .* multiple of 16"):
        plan_model(SMALL, task="causal-lm", float8="tensorwise", batch_size=1, length=30)


def test_memory_is_not_what_it_buys():
    """Weights, states and gradients stay; without bf16 copies of the weights a little falls."""
    usual = plan(replace(CHAT, precision="bf16"), "cuda")
    eight = plan(replace(CHAT, precision="bf16", float8="tensorwise"), "cuda")
    same = ("parameters", "optimizer states")
    assert all(usual.at_peak[name] == eight.at_peak[name] for name in same)
    linear = sum(
        layer.weight.numel() for layer in eight_bits.layers_of(models.build(CHAT)).values()
    )
    assert 0 <= usual.peak - eight.peak <= 2 * linear + 2**20


@pytest.mark.parametrize("name", ["A100-40GB", "MI300X"])
def test_a_gpu_without_fp8_is_refused_in_one_sentence(name):
    assert not KNOWN[name].fp8
    with pytest.raises(ValueError) as caught:
        plan_model(SMALL, gpu=name, float8="tensorwise", task="causal-lm", length=32)
    assert str(caught.value).startswith(f"The {name} has no products in FP8, ")


def test_a_course_plan_has_no_time_there():
    planned = plan(replace(CHAT, float8="rowwise", precision="bf16"), "cuda")
    assert planned.seconds("L4").total > 0
    with pytest.raises(ValueError, match="no fp8 arithmetic"):
        planned.seconds("T4")


def timed(rows, inputs, outputs, scaling, gpu="H100"):
    """Planned seconds of the kernels of a layer's three products, forward and backward."""
    with FakeTensorMode():
        model = nn.Module()
        layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        model.layers = nn.ModuleList([layer])
        if scaling:
            eight_bits.multiply_in_8_bits(model, scaling)
        x = torch.empty(rows, inputs, dtype=torch.bfloat16, requires_grad=True)
        with TraceOps() as trace:
            y = model.layers[0](x)
            y.backward(torch.empty_like(y))
    return sum(kernel.seconds for kernel in seconds(trace.traced, gpu).kernels)


def test_large_products_gain_what_torchao_measured_and_small_ones_lose():
    """torchao, float8/README.md, an H100: 1.39 for 4096 × 8192 × 16,384 and 0.80 for 1024 × 2048 ×
    1024, scaled tensorwise and compiled."""
    large, small = (4096, 8192, 16_384), (1024, 2048, 1024)
    gain = {shape: timed(*shape, None) / timed(*shape, "tensorwise") for shape in (large, small)}
    assert gain[large] == pytest.approx(1.39, rel=0.15)
    assert gain[small] < 1


def test_the_products_are_half_the_time_and_the_casts_are_not_free():
    fields = {"task": "causal-lm", "precision": "bf16", "batch_size": 8, "length": 2048}
    wide = configured(LlamaConfig, 2048, 2, 16, 8192, 1024, max_position_embeddings=2048)
    for name in ("tensorwise", "rowwise"):
        took = plan_model(wide, gpu="H100", float8=name, **fields).seconds("H100")
        flops = {
            kind: sum(k.op.flops * k.times for k in took.kernels if k.op.arithmetic == kind)
            for kind in ("fp8", "bf16")
        }
        usual = plan_model(wide, gpu="H100", **fields).seconds("H100")
        assert took.flops == usual.flops and flops["fp8"] > flops["bf16"] > 0
        casts = sum(k.seconds for k in took.kernels if k.op.name == "float8_scales")
        assert 0 < casts < 0.2 * took.total
        if name == "tensorwise":
            assert took.total < usual.total


def test_a_pooler_is_left_as_it_is():
    """Its rows are examples, which need not be a multiple of 16."""
    config = configured(BertConfig, 64, 1, 4, 128, 96)
    planned = plan_model(config, float8="tensorwise", batch_size=3, length=16)
    assert planned.peak > 0
