"""A step with compiled layers, planned, beside the same step through inductor's own code."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import transformers as library
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from tests.night import few_by_day
from tight_fit.layouts.plan import plan_layout
from tight_fit.models import made
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import batch, plan_model_step
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step
from tight_fit.trace.graph_nodes import written_over
from tight_fit.trace.repeated_layers import layers

pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS = 6
LLAMA = {
    "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 211, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


def llama(layers: int = LAYERS, **fields) -> ModelStep:
    config = library.LlamaConfig(**LLAMA | {"num_hidden_layers": layers})
    usual = {"batch_size": 4, "length": 256, "precision": "bf16"}
    return ModelStep(config, **usual | fields)


@pytest.fixture(params=["checkpoints inside", "checkpoints around"])
def where(request, monkeypatch):
    """Where a layer checkpoints: in its `forward`, or in its `__call__`, which is not compiled, as
    it did up to transformers 5.17."""
    from transformers.modeling_layers import GradientCheckpointingLayer as Base
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Layer

    by_call = "__call__" in vars(Base)
    if request.param == "checkpoints inside":
        if by_call:
            pytest.skip("these layers of transformers checkpoint in __call__")
    elif not by_call:

        def call(self, *args, **kwargs):
            run = partial(nn.Module.__call__, self, **kwargs)
            if self.gradient_checkpointing and self.training:
                return self._gradient_checkpointing_func(run, *args)
            return run(*args)

        monkeypatch.setattr(Layer, "forward", Layer.forward.__wrapped__)
        monkeypatch.setattr(Layer, "__call__", call)


def fused(plan, phase: str) -> list:
    """(kernel, how often) of the fused kernels of a phase, by plan."""
    counted = plan.operations.counted().items()
    return [(op, n) for (op, at), n in counted if op.name == "fused" and at == phase]


def fused_bytes(plan, phase: str) -> float:
    """Bytes that the fused kernels of a layer move, by plan."""
    return sum((op.read + op.written) * times / LAYERS for op, times in fused(plan, phase))


def beside_weights(step: ModelStep) -> int:
    """The peak on a CPU beside weights and optimizer states, planned."""
    plan = plan_model_step(step, "cpu")
    return plan.peak - plan.highest["parameters"] - plan.highest["optimizer states"]


def real_step(step: ModelStep) -> tuple[int, dict[str, int]]:
    """(the most bytes of a step beside weights and states, bytes that the kernels of a layer which
    inductor makes move, by its own count) on real tensors."""
    moved: dict[str, int] = {}
    lower = GraphLowering.compile_to_module

    def lowered(graph):
        made = lower(graph)
        own = [
            node.get_read_write_buffers_sizes()
            for node in graph.scheduler.nodes
            if not isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode))
        ]
        moved["backward" if graph.is_backward else "forward"] = sum(own)
        return made

    plain = replace(step, checkpointing=False)
    model = made.prepare(made.make(plain), plain)
    if step.checkpointing:  # as the library does it; `prepare` adds contexts that do not compile
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(model, step)
    torch.compiler.reset()
    for layer in layers(model.model):
        layer.compile()

    def run(inputs):
        train_step(model, optimizer, iter([inputs]), plain.batch_size, plain)

    try:
        with (
            patch.object(GraphLowering, "compile_to_module", lowered),
            inductor_config.patch(force_disable_caches=True),
        ):
            run(batch(model, plain))
        inputs = batch(model, plain)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run(inputs)
    finally:
        torch.compiler.reset()
    now = most = 0
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, moved


def vit(**fields) -> ModelStep:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = {name: LLAMA[name] for name in names}
    config = library.ViTConfig(**sizes, image_size=64, patch_size=4)
    return ModelStep(config, batch_size=4, **fields)


@pytest.mark.parametrize(
    ("make", "fields", "near", "forward", "backward"),
    [
        (vit, {}, 0.02, (0.99, 1.01), (0.96, 1.04)),
        # On a CPU inductor also copies what Llama's attention reads, which is in no plan.
        (llama, {}, 0.02, (0.8, 1.2), (0.96, 1.04)),
        # And takes maxima apart from what is before, and reads a gradient again to write it
        # transposed, which a GPU's kernels need not.
        (llama, {"float8": "tensorwise"}, 0.03, (0.7, 1), (0.7, 1)),
    ],
    ids=["vit", "llama", "llama in 8 bits"],
)
@pytest.mark.night
def test_peak_and_kernels_are_those_of_inductors_code(make, fields, near, forward, backward):
    most, moved = real_step(make(**fields))
    assert beside_weights(make(**fields, compile=True)) == pytest.approx(most, rel=near)
    plan = plan_model_step(make(**fields, compile=True))
    for phase, (low, high) in {"forward": forward, "backward": backward}.items():
        assert low < fused_bytes(plan, phase) / moved[phase] < high


def test_scales_are_found_by_the_kernels_before_them_and_the_casts_wait_for_them():
    """Of a tensor's largest number; those of its rows are there when a row has been read.

    In the backward pass the casts also turn a matrix, of each of seven products its gradient or
    input; in the forward pass the operands lie as the product wants them."""
    casts, finds = {}, {}
    for scaling in ("tensorwise", "rowwise"):
        plan = plan_model_step(llama(float8=scaling, compile=True))
        forward = fused(plan, "forward")
        finds[scaling] = sum(n for op, n in forward if 0 < op.written < 100)
        alone = [n for op, n in forward if op.layout == "" and op.kind == "elementwise"]
        casts[scaling] = sum(alone)
        assert not any(
            op.name == "float8_scales" for (op, _), _ in plan.operations.counted().items()
        )
        if scaling == "tensorwise":
            turned = [(op, n) for op, n in fused(plan, "backward") if op.kind == "transpose"]
            assert sum(n for _, n in turned) >= 7 * LAYERS
            assert {op.arithmetic for op, _ in turned} == {"fp8"}
            assert not any(op.kind == "transpose" for op, _ in forward)
    # Seven weights, attention's result and the gated product of each layer; norms write as well.
    assert finds["tensorwise"] == 9 * LAYERS and casts["rowwise"] < casts["tensorwise"]


@pytest.mark.night
def test_the_peak_is_that_of_a_layer_that_checkpoints_itself(where):
    most, _ = real_step(llama(checkpointing=True))
    planned = beside_weights(llama(checkpointing=True, compile=True))
    assert planned == pytest.approx(most, rel=0.01)
    assert planned < 0.5 * beside_weights(llama(compile=True))


@pytest.mark.parametrize("checkpointing", few_by_day([True, False]))
def test_layers_that_repeat_stand_for_all(checkpointing, where):
    step = llama(compile=True, checkpointing=checkpointing)
    one, all_of_them = plan_model_step(step), plan_model_step(step, all_layers=True)
    assert one.peak == all_of_them.peak and one.highest == all_of_them.highest
    assert one.seconds("A100").total == pytest.approx(all_of_them.seconds("A100").total)


def test_a_compiled_layer_recomputed_inside_keeps_what_is_said():
    """Its input, the results of attention and of every second product, by their shapes; of
    products in 8 bits also the largest numbers of what they multiply."""

    def kept(count: int) -> int:
        fields = {"batch_size": 4, "length": 256, "compile": True, "float8": "tensorwise"}
        plan = plan_layout(llama(count).config, "fsdp=2", selective=True, **fields)
        return plan.highest["activations"]

    tokens, numbers = 2 * 256, 64 + 64 + 32 + 128 + 64  # input, q, v, gate, attention
    sums = 4 * 4  # fp32 for each head
    scales = (7 + 4) * 512  # of weights and of inputs, in blocks of an allocator
    assert kept(9) - kept(8) == tokens * (2 * numbers + sums) + scales
    with pytest.raises(ValueError, match="compile=True is planned with data ranks only"):
        plan_layout(llama().config, "fsdp=2,tensor=2", batch_size=4, compile=True)


def test_weights_in_8_bits_are_made_again():
    """Weights are there anyway, so that keeping them costs the compiler nothing: of products in 8
    bits a layer keeps the scales of their inputs beside what it keeps without, in blocks of 512."""

    def of_a_layer(float8: str | None) -> int:
        fields = {"batch_size": 1, "length": 16, "compile": True, "float8": float8}
        nine, eight = (plan_model_step(llama(count, **fields)) for count in (9, 8))
        return nine.highest["activations"] - eight.highest["activations"]

    weights = 4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 128
    assert of_a_layer("tensorwise") - of_a_layer(None) < 20 * 512 < weights / 2


@pytest.mark.parametrize(
    ("function", "over"),
    [
        (lambda x, y: [x.sin() * y], True),
        (lambda x, y: [x.view(-1).sin().view(4, 4) + y], True),
        (lambda x, y: [x.sin(), x.cos()], False),  # both read it
        (lambda x, y: [x.t().sin() + y], False),  # it is read in another order
        (lambda x, y: [x.double()], False),  # the result is larger
    ],
)
def test_a_result_is_written_over_an_input_that_it_alone_reads_in_its_order(function, over):
    graph = make_fx(lambda x, y: function(x, y))(torch.ones(4, 4), torch.ones(4, 4)).graph
    first, second, *nodes, output = graph.nodes
    reused = written_over(nodes, output.all_input_nodes, lambda node: node is second)
    assert list(reused.values()) == [first] * over
    assert not written_over(nodes, output.all_input_nodes, lambda node: True)
