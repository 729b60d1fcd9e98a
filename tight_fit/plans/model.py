"""Plans for models that the course never mentions, each from its configuration.

These are the encoders, decoders, encoder-decoders and image classifiers of transformers, models
that read images in a text, and Whisper. The step, the optimizers and the planner are the course's
own. The model is made without values: first on torch's meta device, as transformers itself makes
the models it loads, then with fake tensors.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from tight_fit.gpus import GPU, as_gpu, device_of
from tight_fit.gpus.specs import check_fp8
from tight_fit.kernels.trace_ops import Recorder
from tight_fit.memory.plan import Plan, check_device, to_plan
from tight_fit.models import config as hf_config
from tight_fit.models import images, odd
from tight_fit.models.config import CannotPlan
from tight_fit.models.made import FlatLogits, empty, real
from tight_fit.models.step import ModelStep
from tight_fit.techniques import model_changes, references
from tight_fit.techniques.four_bits import count_parameters
from tight_fit.techniques.model_changes import as_if_real
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.precision import DTYPES
from tight_fit.techniques.step import AUTOCAST, Batch, train_step
from tight_fit.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues, NeverSkipScaler
from tight_fit.trace.known_values import known_values
from tight_fit.trace.repeated_layers import RepeatedLayers, give_gradients, layers
from tight_fit.trace.splice import NotAlike
from tight_fit.trace.steps import trace_step
from tight_fit.trace.storage_trace import StorageTrace

PACKAGE = Path(__file__).parents[1]


def plan_model(
    model: PretrainedConfig | str | Path,
    *,
    gpu: str | GPU | None = None,
    device: str = "cuda",
    **fields,
) -> Plan:
    """Plan one optimizer step of any Hugging Face model.

    >>> from tight_fit import plan_model
    >>> planned = plan_model("roberta-large", gpu="T4", precision="fp16", batch_size=16)
    >>> print(planned.fits("T4"))
    needs 13.5 GiB, the T4 has 14.6 GiB: 1.0 GiB to spare

    model   a configuration, a folder, a config.json, or a name on the hub (`hf_config.read`)
    gpu     the GPU whose kernels are planned, a name or a `GPU`; None for one from Ampere on, which
            has FlashAttention's kernel
    device  "cuda", or "cpu" for a step on the host
    fields  those of `ModelStep`: batch_size, length, precision, optimizer, checkpointing,
            accumulation, frozen, lora_rank, task, classes, side, weights
    Raises CannotPlan, ValueError or TypeError, FileNotFoundError, hub.HubUnavailable: one sentence
    each.
    """
    step = ModelStep.of(model, **fields)
    if gpu is not None:
        gpu = as_gpu(gpu)
        if device == "cpu":
            raise ValueError('gpu= is for a GPU and device="cpu" for the host: give one of them.')
        check_fp8(step.float8, gpu)
        step, device = step.on(gpu.capability), device_of(gpu)
    return plan_model_step(step, device)


def plan_model_step(model_step: ModelStep, device: str = "cuda", all_layers: bool = False) -> Plan:
    """The same for a `ModelStep`; `all_layers` as for `trace_model_step`."""
    return to_plan(trace_model_step(model_step, device, all_layers), model_step, device)


def trace_model_step(
    model_step: ModelStep,
    device: str = "cuda",
    all_layers: bool = False,
    make_batch: Callable[[FlatLogits, ModelStep], Batch] | None = None,
    change: Callable[[FlatLogits], object] | None = None,
) -> tuple[StorageTrace, int]:
    """Trace one steady step on fake tensors: the optimizer has its states already.

    Returns the trace of which a plan is made, and the number of the model's parameters. From the
    third micro-batch on nothing new happens, so at most two micro-batches are traced.

    all_layers  True traces each layer; else those that repeat are traced once where that is proven
                equal (`trace.splice`)
    make_batch  `make_batch(model, model_step)` makes a micro-batch without values; None: `batch`
    change      a further change of the model, in place, before its optimizer is made
    Raises ValueError for a device other than "cuda" and "cpu".
    """
    check_device(device)
    follows = model_step.reads == "images"  # what is read there says how long things are
    step = _Step(model_step, device, make_batch or batch, change, follows)
    with as_if_real(), as_cannot_plan(model_step):
        try:
            trace, parameters, trainable = step.trace(all_layers)
        except RuntimeError:  # shapes follow from numbers in a batch: DeBERTa v1, BART
            if follows:
                raise
            step, traced = replace(step, follows=True), None
            with suppress(Exception):
                traced = step.trace(all_layers)
            if traced is None:
                raise
            trace, parameters, trainable = traced
        if len(trace.reached) < trainable:
            # Some parameter gets no gradient, so on real tensors it has no optimizer states.
            trace, parameters, _ = step.trace(all_layers, trace.reached)
    return trace, parameters


@dataclass(frozen=True)
class _Step:
    """What is traced, once or several times; `follows` the values of its batch or not."""

    model_step: ModelStep
    device: str
    make_batch: Callable[[FlatLogits, ModelStep], Batch]
    change: Callable[[FlatLogits], object] | None
    follows: bool

    def trace(
        self, all_layers: bool, only: Collection[int] | None = None
    ) -> tuple[StorageTrace, int, int]:
        """The step's trace, the number of its parameters, and in how many tensors they train.

        only  positions of the parameters that get optimizer states; None for all that train
        """
        if not all_layers:
            with suppress(NotAlike):
                return self._traced(False, only)
        return self._traced(True, only)

    def _kernels(self) -> CudaKernels:
        flash = getattr(self.model_step, "flash", True)
        return CudaKernels(self.model_step, self.device == "cuda", flash)

    def _traced(
        self, all_layers: bool, only: Collection[int] | None
    ) -> tuple[StorageTrace, int, int]:
        settings = self.model_step
        known = known_values() if self.follows else nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), known:
            model = empty(settings, self._kernels)
            if self.change is not None:
                self.change(model)
            trained = {
                place: parameter
                for place, parameter in enumerate(model.parameters())
                if parameter.requires_grad
            }
            without_states = [
                parameter
                for place, parameter in trained.items()
                if only is not None and place not in only
            ]
            for parameter in without_states:
                parameter.requires_grad_(False)
            repeated = None if all_layers else RepeatedLayers(_alone(model))
            if repeated is not None and not repeated.stacks:
                repeated = None
            optimizer = make_optimizer(model, settings)
            scaler = NeverSkipScaler("cpu", enabled=settings.precision == "fp16")
            # A first update, so that the optimizer makes its states.
            give_gradients(model.parameters())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(torch.zeros(()))  # the scaler makes its tensors when it is first used
            for parameter in without_states:
                parameter.requires_grad_(True)
            recorder = Recorder() if self.device == "cuda" else None
            make_batch = partial(self.make_batch, model, settings)
            try:
                compiled = layers(_alone(model)) if settings.compile else []
                with self._kernels():
                    trace = trace_step(
                        model, optimizer, make_batch, settings, scaler, recorder, repeated, compiled
                    )
            except Exception as error:
                if repeated is None:
                    raise
                raise NotAlike("A step without some of its layers fails.") from error
        return trace, count_parameters(_alone(model)), len(trained)


def _alone(model: nn.Module) -> nn.Module:
    """The model without a reference beside it."""
    return model.model if isinstance(model, FlatLogits) else model


def measured(model_step: ModelStep, batches: Callable[[], Batch] | None = None) -> Plan:
    """The second step on real tensors of this machine's CPU with random weights, as a `Plan`.

    batches  gives the micro-batches; None draws them at random
    """
    with model_changes.quiet():
        model = real(model_step)
    optimizer, scaler = make_optimizer(model, model_step), make_scaler(model_step, "cpu")
    batches = batches or (lambda: batch(model, model_step))
    micro_batches = (batches() for _ in range(model_step.accumulation))
    train_step(model, optimizer, micro_batches, model_step.batch_size, model_step, scaler=scaler)
    trace = trace_step(model, optimizer, batches, model_step, scaler)
    return to_plan((trace, count_parameters(_alone(model))), model_step, "cpu")


def batch(model: FlatLogits, model_step: ModelStep) -> Batch:
    """A micro-batch of examples without padding, drawn at random; fake inside FakeTensorMode.

    Token ids and labels are int64: input_ids [examples, tokens]; labels [examples], [examples ×
    tokens] where each token has one, [examples, height, width] where each pixel has one, and
    [2 × examples] for pairs. Images are [examples, channels, height, width] (`images.inputs` has
    those in a text), sounds [examples, mel bins, frames]: fp32 or, where nothing casts them, in the
    dtype of the weights.
    """
    examples, kind = model_step.micro_batch, model_step.kind
    config: Any = model.model.config
    inputs: Batch = {}
    casts = model_step.precision in AUTOCAST or model_step.weights is None
    dtype = torch.float32 if casts else DTYPES[model_step.weights or "fp32"]
    if kind.reads in ("image", "pair"):
        shape = hf_config.image_shape(config, model_step.side)
        inputs["pixel_values"] = torch.randn(examples, *shape, dtype=dtype)
    if kind.reads == "pair":
        vocabulary, tokens = hf_config.text_config(config).vocab_size, model_step.tokens
        inputs["input_ids"] = torch.randint(vocabulary, (examples, tokens or 1))
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs | {"labels": torch.arange(examples).repeat(2)}
    if kind.reads == "image":
        places = shape[1:] if kind.each == "pixel" else ()
        return inputs | {"labels": torch.randint(config.num_labels, (examples, *places))}
    vocabulary, tokens = hf_config.text_config(config).vocab_size, model_step.tokens
    assert tokens is not None, "a model that reads text has a length"
    if model_step.task in references.TASKS:
        return _compared(model, model_step, vocabulary)
    if kind.reads == "images":
        inputs = images.inputs(config, examples, tokens, model_step.side, dtype)
        return inputs | {"labels": torch.randint(vocabulary, (examples * tokens,))}
    if kind.reads == "speech":
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.randn(examples, config.num_mel_bins, frames, dtype=dtype)
        inputs["decoder_input_ids"] = torch.randint(vocabulary, (examples, tokens))
        return inputs | {"labels": torch.randint(vocabulary, (examples * tokens,))}
    inputs["input_ids"] = torch.randint(vocabulary, (examples, tokens))
    end = getattr(config, "eos_token_id", None)
    if end is not None and config.is_encoder_decoder and kind.classifies and kind.each == "example":
        # BART and T5 classify by the token that ends a text, of which each text has one.
        texts, other = inputs["input_ids"], end - 1 if end else 1
        texts.masked_fill_(texts == end, other)[:, -1] = end
    if kind.reads == "texts":
        inputs["decoder_input_ids"] = torch.randint(vocabulary, (examples, tokens))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    classes = config.num_labels if kind.classifies else vocabulary
    count = examples * tokens if kind.each == "token" else examples
    return inputs | {"labels": torch.randint(classes, (count,))}


def _compared(model: FlatLogits, model_step: ModelStep, vocabulary: int) -> Batch:
    """A micro-batch of dpo or grpo, as `preferences.loss_sum` takes it."""
    rows, tokens = model_step.micro_batch * model_step.sequences, model_step.tokens or 1
    inputs: Batch = {"input_ids": torch.randint(vocabulary, (rows, tokens))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    labels = torch.randint(vocabulary, (rows, tokens))
    if model_step.completion is not None:
        inputs["advantages"] = torch.randn(rows)
        if "logits_to_keep" in inspect.signature(model.model.forward).parameters:
            labels = torch.randint(vocabulary, (rows, model_step.completion + 1))
        if model_step.compared_with != references.NONE:
            inputs["reference"] = torch.randn(labels.shape)
    elif model_step.compared_with == references.PRECOMPUTED:
        inputs["reference"] = torch.randn(rows)
    return inputs | {"labels": labels}


@contextmanager
def as_cannot_plan(model_step: ModelStep) -> Iterator[None]:
    """Whatever an unknown architecture cannot do on fake tensors is raised as CannotPlan."""
    name = model_step.config.model_type
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise CannotPlan(
            f"{name} cannot be planned: the sizes of its tensors depend on their values "
            f"({hf_config.sentence(error)[:-1]}), which a plan does not have."
        ) from error
    except Exception as error:
        if isinstance(error, (ValueError, TypeError, ModuleNotFoundError)) and _is_ours(error):
            raise
        raise CannotPlan(
            f"{name} cannot be planned: on tensors without values its step ends in "
            f"{type(error).__name__}, {hf_config.sentence(error)[:-1]}"
            f"{odd.hint(name, model_step.config.to_dict())}."
        ) from error


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised an error: then its text is a sentence for the user."""
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ModuleNotFoundError) or Path(raised).is_relative_to(PACKAGE)
