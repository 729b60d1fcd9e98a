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
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
LLAMA = SMALL | {"vocab_size": 211, "num_key_value_heads": 2, "max_position_embeddings": 256}


def llama(**fields) -> ModelStep:
    return ModelStep(library.LlamaConfig(**LLAMA), batch_size=4, length=256, **fields)


def vit(**fields) -> ModelStep:
    config = library.ViTConfig(**SMALL, image_size=64, patch_size=4)
    return ModelStep(config, batch_size=4, **fields)


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


def fused_bytes(plan, phase: str) -> float:
    """Bytes that the fused kernels of a layer move, by plan."""
    counted = plan.operations.counted().items()
    return sum(
        (op.read + op.written) * times / LAYERS
        for (op, at), times in counted
        if op.name == "fused" and at == phase
    )


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


@pytest.mark.parametrize(
    ("make", "precision", "forward"), [(llama, "bf16", 0.2), (vit, "fp32", 0.01)]
)
def test_peak_and_kernels_are_those_of_inductors_code(make, precision, forward):
    """On a CPU inductor also copies what Llama's attention reads, which is in no plan."""
    most, moved = real_step(make(precision=precision))
    assert beside_weights(make(precision=precision, compile=True)) == pytest.approx(most, rel=0.02)
    plan = plan_model_step(make(precision=precision, compile=True))
    assert fused_bytes(plan, "forward") == pytest.approx(moved["forward"], rel=forward)
    assert fused_bytes(plan, "backward") == pytest.approx(moved["backward"], rel=0.04)


@pytest.mark.night
def test_the_peak_with_products_in_8_bits_is_that_of_inductors_code():
    """Its kernels on a CPU read more than is planned: they take maxima apart from what is before,
    and read a gradient again to write it transposed, which a GPU's need not."""
    fields = {"precision": "bf16", "float8": "tensorwise"}
    most, moved = real_step(llama(**fields))
    assert beside_weights(llama(**fields, compile=True)) == pytest.approx(most, rel=0.03)
    plan = plan_model_step(llama(**fields, compile=True))
    for phase in ("forward", "backward"):
        assert 0.7 < fused_bytes(plan, phase) / moved[phase] < 1


def test_a_scale_is_found_by_the_kernels_before_it_and_the_cast_waits_for_it():
    """Of a tensor's largest number; those of its rows are there when a row has been read."""
    kinds = {}
    for scaling in ("tensorwise", "rowwise"):
        plan = plan_model_step(llama(precision="bf16", float8=scaling, compile=True))
        counted = plan.operations.counted().items()
        fused = [(op, n) for (op, at), n in counted if op.name == "fused" and at == "forward"]
        kinds[scaling] = {
            "finds": sum(n for op, n in fused if 0 < op.written < 100),
            "casts": sum(n for op, n in fused if op.layout == "" and op.kind == "elementwise"),
        }
        assert not any(op.name == "float8_scales" for (op, _), _ in counted)
    # Seven weights, attention's result and the gated product of each layer; norms write as well.
    assert kinds["tensorwise"]["finds"] == 9 * LAYERS
    assert kinds["rowwise"]["casts"] < kinds["tensorwise"]["casts"]


def test_casts_to_8_bits_that_turn_a_matrix_move_it_as_copies_between_layouts_do():
    """In the backward pass, of each of seven products its gradient or input; in the forward pass
    the operands lie as the product wants them."""
    plan = plan_model_step(llama(precision="bf16", float8="tensorwise", compile=True))
    turned = {"forward": 0, "backward": 0}
    for (op, at), times in plan.operations.counted().items():
        if op.name == "fused" and op.kind == "transpose":
            turned[at] += times
            assert op.arithmetic == "fp8"
    assert turned["forward"] == 0 and turned["backward"] >= 7 * LAYERS


@pytest.mark.night
def test_the_peak_is_that_of_a_layer_that_checkpoints_itself(where):
    most, _ = real_step(llama(precision="bf16", checkpointing=True))
    planned = beside_weights(llama(precision="bf16", checkpointing=True, compile=True))
    assert planned == pytest.approx(most, rel=0.01)
    assert planned < 0.5 * beside_weights(llama(precision="bf16", compile=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_that_repeat_stand_for_all(checkpointing, where):
    step = llama(precision="bf16", compile=True, checkpointing=checkpointing)
    one, all_of_them = plan_model_step(step), plan_model_step(step, all_layers=True)
    assert one.peak == all_of_them.peak and one.highest == all_of_them.highest
    assert one.seconds("A100").total == pytest.approx(all_of_them.seconds("A100").total)


def test_a_compiled_step_takes_less_of_both():
    plain, compiled = (plan_model_step(llama(compile=is_it)) for is_it in (False, True))
    assert compiled.peak < 0.95 * plain.peak
    assert compiled.operations.bytes["backward"] < 0.8 * plain.operations.bytes["backward"]
    assert compiled.flops == plain.flops


@pytest.mark.parametrize("float8", [None, "tensorwise"])
def test_a_compiled_layer_recomputed_inside_keeps_what_is_said(float8):
    """Its input, the results of attention and of every second product, by their shapes; of
    products in 8 bits also the largest numbers of what they multiply."""

    def kept(count: int) -> int:
        config = library.LlamaConfig(**LLAMA | {"num_hidden_layers": count})
        fields = {"batch_size": 4, "length": 256, "compile": True, "float8": float8}
        plan = plan_layout(config, "fsdp=2", selective=True, **fields)
        return plan.highest["activations"]

    tokens, numbers = 2 * 256, 64 + 64 + 32 + 128 + 64  # input, q, v, gate, attention
    sums = 4 * 4  # fp32 for each head
    scales = (7 + 4) * 512 if float8 else 0  # of weights and of inputs, in blocks of an allocator
    assert kept(9) - kept(8) == tokens * (2 * numbers + sums) + scales


def test_layers_are_compiled_with_data_ranks_only():
    with pytest.raises(ValueError, match="compile=True is planned with data ranks only"):
        plan_layout(library.LlamaConfig(**LLAMA), "fsdp=2,tensor=2", batch_size=4, compile=True)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_weights_in_8_bits_are_made_again(scaling):
    """Weights are there anyway, so that keeping them costs the compiler nothing: of products in 8
    bits a layer keeps the scales of their inputs beside what it keeps without, in blocks of 512."""

    def kept(count: int, float8: str | None) -> int:
        config = library.LlamaConfig(**LLAMA | {"num_hidden_layers": count})
        fields = {"precision": "bf16", "compile": True, "float8": float8}
        plan = plan_model_step(ModelStep(config, batch_size=1, length=16, **fields))
        return plan.highest["activations"]

    without, more = (kept(9, float8) - kept(8, float8) for float8 in (None, scaling))
    weights = 4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 128
    assert more - without < 20 * 512 < weights / 2


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
