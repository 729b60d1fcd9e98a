"""NeuSight's steps on four A100s, traced without values as they were run: GPT-2 large by data,
tensor and pipeline parallelism.

NeuSight (github sitar-lab/NeuSight, scripts for A100-SXM4-40GB, MIT) ran Megatron through
Accelerate: 4 examples of 1,024 tokens in all, fp32 without TF32, forward and backward pass without
the optimizer. Megatron's own data parallelism reduces all gradients in one message after the
backward pass. Its tensor parallelism divides heads, hidden units and vocabulary, and sums over the
ranks twice per layer in each pass (Shoeybi et al. 2019). Its pipeline has one micro-batch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from benchmarks.neusight_steps import Note, add, trace
from benchmarks.pages import config_of
from tight_fit.kernels.op import BACKWARD, FORWARD, OPTIMIZER, Op
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.schedules import one_f_one_b
from tight_fit.layouts.seconds import StepTime, step

LENGTH, EXAMPLES, RANKS = 1024, 4, 4
GPU, LINK, MODEL = "A100-40GB", "NVLink 3", "gpt2_large"
LAYOUTS = {
    "dp4": Layout(RANKS, "ddp"),
    "tp4": Layout(tensor=RANKS),
    "pp4_1": Layout(1, "ddp", pipeline=RANKS),
}


@cache
def ranks(layout: str) -> list[TracedOps]:
    """What one rank of each stage runs, and sends, in forward and backward pass of a layout, a key
    of `LAYOUTS`."""
    return {"dp4": _data, "tp4": _tensor, "pp4_1": _pipeline}[layout]()


def planned(layout: str) -> StepTime:
    """The planned time of forward and backward pass of a layout."""
    schedule = one_f_one_b(RANKS, 1) if LAYOUTS[layout].pipeline > 1 else None
    return step(ranks(layout), GPU, LINK, schedule)


def _data() -> list[TracedOps]:
    traced, size = trace(MODEL, "train", LENGTH, EXAMPLES // RANKS)
    add(traced, _message("all_reduce", size, "data"), OPTIMIZER)
    return [traced]


def _tensor() -> list[TracedOps]:
    def divide(model: nn.Module, note: Note) -> None:
        size = 4 * EXAMPLES * LENGTH * model.config.n_embd
        summed = _message("all_reduce", size, "tensor")

        def g(module, args, result):  # Megatron's names: g sums in the forward pass, f in the other
            note(summed)

        def f(module, args, result):
            return _Watched.apply(result, lambda: note(summed))

        for block in model.transformer.h:
            _divide(block.attn.c_attn, 1)
            _divide(block.attn.c_proj, 0)
            block.attn.num_heads //= RANKS
            block.attn.split_size //= RANKS
            _divide(block.mlp.c_fc, 1)
            _divide(block.mlp.c_proj, 0)
            for into, out in ((block.ln_1, block.attn.c_proj), (block.ln_2, block.mlp.c_proj)):
                into.register_forward_hook(f)
                out.register_forward_hook(g)
        rows = -(-model.config.vocab_size // RANKS)
        model.transformer.wte = nn.Embedding(rows, model.config.n_embd)
        model.lm_head.weight = model.transformer.wte.weight
        model.transformer.wte.register_forward_hook(g)
        model.transformer.ln_f.register_forward_hook(f)

    return [trace(MODEL, "train", LENGTH, EXAMPLES, divide)[0]]


def _pipeline() -> list[TracedOps]:
    """Four traces: the whole model's, cut where a stage begins and where its gradient leaves it."""
    begins: dict[tuple[str, int], int] = {}

    def cut(model: nn.Module, note: Note) -> None:
        blocks = model.transformer.h
        for stage in range(1, RANKS):

            def entered(module, args, stage=stage):
                begins["F", stage] = note(None)

                def left():
                    begins["B", stage] = note(None)

                return _Watched.apply(args[0], left), *args[1:]

            blocks[stage * len(blocks) // RANKS].register_forward_pre_hook(entered)

    traced, _ = trace(MODEL, "train", LENGTH, EXAMPLES, cut)
    config = config_of(MODEL)
    sent = _message("send", 4 * EXAMPLES * LENGTH * config.n_embd, "pipeline")
    backward = next(place for place, (_, phase) in enumerate(traced.order) if phase == BACKWARD)
    stages = []
    for stage in range(RANKS):
        first = begins["F", stage] if stage else 0
        last = begins["F", stage + 1] if stage + 1 < RANKS else backward
        begin = begins["B", stage + 1] if stage + 1 < RANKS else backward
        end = begins["B", stage] if stage else len(traced.order)
        own = TracedOps(list(traced.ops), traced.order[first:last])
        if stage + 1 < RANKS:
            add(own, sent, FORWARD)
        own.passes = (0, len(own.order))
        own.order += traced.order[begin:end]
        if stage:
            add(own, sent, BACKWARD)
        stages.append(own)
    return stages


class _Watched(torch.autograd.Function):
    """The identity, which tells when its gradient is there."""

    @staticmethod
    def forward(ctx, value, tell):
        ctx.tell = tell
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        ctx.tell()
        return gradient, None


def _divide(layer: nn.Module, axis: int) -> None:
    """Keep one rank's part of a `Conv1D` of transformers, whose weight is (inputs, outputs)."""
    shape = list(layer.weight.shape)
    shape[axis] //= RANKS
    layer.weight, layer.nf = nn.Parameter(torch.empty(shape)), shape[1]
    layer.bias = nn.Parameter(torch.empty(shape[1]))


def _message(kind: str, payload: int, axis: str) -> Op:
    return Op(kind, "message", "fp32", 0, payload, 0, (RANKS,), axis)
