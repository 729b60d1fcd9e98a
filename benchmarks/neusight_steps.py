"""The whole passes that NeuSight published, traced without values as they were timed.

NeuSight (github sitar-lab/NeuSight, neusight/Tracing/trace.py, MIT): fp32 without TF32, PyTorch
2.1, attention written out by transformers of 2024, no mask given, dropout on in training, gradients
kept from pass to pass (so the backward pass adds to them), the loss computed between the two timed
passes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AttentionInterface
from transformers.initialization import no_init_weights

from benchmarks.pages import config_of
from tight_fit.kernels.op import BACKWARD, FORWARD, Op
from tight_fit.kernels.trace_ops import TraceOps
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues

Note = Callable[[Op | None], int]


MODELS = ("bert_large", "gpt2_large", "gpt3_xl", "gpt3_27", "opt_13")  # of data/models.json
KINDS = {
    ("bert", "train"): transformers.BertForPreTraining,
    ("bert", "inf"): transformers.BertForSequenceClassification,
    ("gpt2", "train"): transformers.GPT2LMHeadModel,
    ("gpt2", "inf"): transformers.GPT2LMHeadModel,
    ("opt", "train"): transformers.OPTForCausalLM,
    ("opt", "inf"): transformers.OPTForCausalLM,
}


def attention_of_2024(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **rest):
    """What transformers 4.3x and 4.4x wrote out, operation by operation.

    BERT divides by √d and adds a mask of zeros; GPT-2 divides, and sets what lies ahead by
    `torch.where`; OPT scales the
    queries, adds a mask and takes the maximum with the least number.
    """
    family = type(module).__name__
    rows, length = query.shape[0], query.shape[-2]
    if family.startswith("OPT"):
        scores = torch.bmm(
            query.reshape(-1, *query.shape[2:]), key.reshape(-1, *key.shape[2:]).transpose(1, 2)
        )
        scores = scores.view(rows, -1, length, length) + query.new_zeros(rows, 1, length, length)
        scores = torch.max(scores, torch.zeros(()))
    else:
        scores = torch.matmul(query, key.transpose(-1, -2))
        if family.startswith("GPT2"):
            scores = scores / torch.full([], 8.0)
            scores = torch.where(
                torch.ones(1, 1, length, length, dtype=torch.bool), scores, torch.full([], -1e9)
            )
        else:
            scores = scores / 8.0
            scores = scores + query.new_zeros(rows, 1, 1, length)
    weights = F.dropout(torch.softmax(scores, -1), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


ATTENTION = "attention_of_2024"  # its name for a configuration
AttentionInterface.register(ATTENTION, attention_of_2024)


def trace(
    name: str,
    mode: str,
    length: int,
    batch: int,
    change: Callable[[nn.Module, Note], object] = lambda model, note: None,
) -> tuple[TracedOps, int]:
    """(forward and, for mode "train", backward pass of NeuSight's model `name`, bytes of the
    gradients).

    change  is given the model, and a function that notes a message, if it is given one, at the
            place in the order that the step has got to, and returns that place
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeValues(),
        CudaKernels(SimpleNamespace(precision="fp32")),
    ):
        config = config_of(name)
        config._attn_implementation = ATTENTION
        with no_init_weights():
            model = KINDS[config.model_type, mode](config)
        phase = FORWARD

        def note(op: Op | None) -> int:
            if op is not None:
                add(ops.traced, op, phase)
            return len(ops.traced.order)

        change(model, note)
        model.train(mode == "train")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.zeros(batch, length, dtype=torch.long)
        with TraceOps() as ops, torch.set_grad_enabled(mode == "train"):
            found = model(input_ids=ids)
            if mode == "train":
                logits = (
                    found["prediction_logits"] if "prediction_logits" in found else found["logits"]
                )
                ops.looking = False  # the loss is not timed
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))
                ops.looking = True
                ops.phase("backward")
                phase = BACKWARD
                loss.backward()
        return ops.traced, sum(4 * parameter.numel() for parameter in model.parameters())


def add(traced: TracedOps, op: Op, phase: int) -> None:
    """Put an operation at the end of what was traced."""
    traced.ops.append((op,))
    traced.order.append((len(traced.ops) - 1, phase))
