"""Plans for models that the course never mentions: any encoder, decoder, encoder-decoder or image classifier of
transformers, from its configuration.

The step, the optimizers and the planner are the course's own. The model is made without values: on torch's meta device
first, where transformers itself makes the models it loads, then each tensor on the fake device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import import_utils

from helpers import models
from helpers.memory.timeline import Plan, to_plan
from helpers.memory.trace import trace_step
from helpers.optimizers import make_optimizer, make_scaler
from helpers.plan import hf_config
from helpers.plan.hf_config import TASKS, CannotPlan
from helpers.plan.hf_model import ModelStep, empty, make, prepare
from helpers.plan.planner import trace_recipe
from helpers.step import Batch, train_step
from helpers.torch_private import DataDependentOutputException, DynamicOutputShapeException


def plan_model(model: PretrainedConfig | str | Path, target: str = "cuda", **fields) -> Plan:
    """Plan one optimizer step of any Hugging Face model.

    model   a configuration, a folder, a config.json, or a name on the hub (`architectures.read`)
    fields  those of `ModelStep`: batch_size, length, precision, optimizer, checkpointing, accumulation, frozen, lora_rank,
            task, classes, side
    Raises CannotPlan, ValueError or TypeError, FileNotFoundError, hub.HubUnavailable: one sentence each.
    """
    return plan_model_step(ModelStep(hf_config.read(model), **fields), target)


def plan_model_step(model_step: ModelStep, target: str = "cuda") -> Plan:
    """The same for a `ModelStep`."""
    with _as_if_real(), _said_plainly(model_step):
        reached: set[str] = set()
        traced = _trace(model_step, target, reached)
        if (
            len(reached) < traced[2]
        ):  # some parameter has no gradient, so it has no optimizer states
            traced = _trace(model_step, target, reached, sieve=True)
    return to_plan(traced[:2], model_step, target)


def _trace(model_step: ModelStep, target: str, reached: set[str], sieve: bool = False):
    """`plan.trace`'s answer, and the number of parameters that train. Notes in `reached` those that a gradient reaches;
    with `sieve` the others are hidden until the optimizer has its states."""
    hidden, count = [], 0

    def watched(model_step, recompute):
        nonlocal count
        model = empty(model_step, recompute)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            count += 1
            if sieve and name not in reached:
                hidden.append(parameter.requires_grad_(False))
            elif not sieve:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, name=name: reached.add(name)
                )
        return model

    def make_batch(model, model_step):
        while hidden:
            hidden.pop().requires_grad_(True)
        return batch(model, model_step)

    return *trace_recipe(model_step, target, empty=watched, make_batch=make_batch), count


def measured(model_step: ModelStep, batches: Callable[[], Batch] | None = None) -> Plan:
    """The step on real tensors of this machine's CPU, random weights, followed by the same tracker."""
    with models._quiet():
        model = prepare(make(model_step), model_step)
    optimizer, scaler = make_optimizer(model, model_step), make_scaler(model_step, "cpu")
    batches = batches or (lambda: batch(model, model_step))
    train_step(
        model,
        optimizer,
        (batches() for _ in range(model_step.accumulation)),
        model_step.batch_size,
        model_step,
        scaler=scaler,
    )
    storage_trace = trace_step(model, optimizer, batches, model_step, scaler)
    return to_plan(
        (storage_trace, sum(parameter.numel() for parameter in model.parameters())),
        model_step,
        "cpu",
    )


def batch(model: nn.Module, model_step: ModelStep) -> Batch:
    """A micro-batch of rows without padding, drawn at random (or without values, inside FakeTensorMode)."""
    rows, task = model_step.micro_batch, TASKS[model_step.task]
    config = model.model.config
    if task.reads == "image":
        pixels = torch.randn(rows, *hf_config.image_shape(config, model_step.side))
        return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (rows,))}
    words = hf_config.text_config(config).vocab_size

    def ids() -> torch.Tensor:
        return torch.randint(words, (rows, model_step.tokens))

    found = {"input_ids": ids()}
    if task.reads == "texts":
        found["decoder_input_ids"] = ids()
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    classes = config.num_labels if "classification" in model_step.task else words
    found["labels"] = torch.randint(
        classes, (rows * (model_step.tokens if task.each == "token" else 1),)
    )
    return found


@contextmanager
def _as_if_real():
    """transformers takes other ways on tensors without values than on real ones; here it must take the real ones'. Modules
    that are sent to a type or a place in the forward pass are there: all is fp32 on one device."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "to", lambda module, *args, **kwargs: module))
        if hasattr(import_utils, "is_fake_tensor"):
            stack.enter_context(patch.object(import_utils, "is_fake_tensor", lambda tensor: False))
        yield


@contextmanager
def _said_plainly(model_step: ModelStep):
    name = model_step.config.model_type
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise CannotPlan(
            f"{name} cannot be planned: the sizes of its tensors depend on their values "
            f"({hf_config._sentence(error)[:-1]}), which a plan does not have."
        ) from error
    except (ValueError, TypeError, ModuleNotFoundError):
        raise
    except (
        Exception
    ) as error:  # whatever an unknown architecture does that tensors without values cannot
        raise CannotPlan(
            f"{name} cannot be planned: on tensors without values its step ends in {type(error).__name__}, "
            f"{hf_config._sentence(error)}"
        ) from error
