"""`PlanCallback`: what a step of transformers' Trainer will need, said before the first one.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PlanCallback()])

The Trainer's own model and optimizer are copied without values, and its step (forward, backward,
clipping, update) is planned on the longest batch that the data set can give. Where it will not fit,
the changes are named that make it fit. After the training, the plan stands beside what the GPU
reserved; where the GPU runs out of memory, a line says what the plan expected.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from tight_fit.gpus import GPU, as_gpu, here
from tight_fit.memory.plan import Fit
from tight_fit.plans.own_step import CustomStepPlan, plan_custom_step
from tight_fit.script.loaders import find_longest, shape_of
from tight_fit.torch_private import OUT_OF_MEMORY_OBSERVER
from tight_fit.units import size, span

MICRO_BATCHES = 2  # that are traced: all others repeat the second
REMEDIES = 3  # times that the batch is halved


class PlanCallback(TrainerCallback):
    """Plan a Trainer's step before its first one, and compare the plan with the GPU at the end.

    >>> from tight_fit import PlanCallback
    >>> PlanCallback("2080 ti").gpu.name  # goes into the Trainer's `callbacks`
    'RTX 2080 Ti'

    gpu    the GPU to plan for, a name, a size ("16GB") or a `GPU`; None takes the one that is here
    say    what a line is given to; `print` by default
    facts  what was planned and measured, for dashboards: {"gpu", "memory", "batch" (shape), "need",
           "fits", "allocated", "reserved", "seconds" (or None), "measured"}, in bytes and seconds

    The step of one process is planned, uncompiled, with the model's own loss. Raises ValueError for
    an unknown GPU. What cannot be planned is said in one line, and training goes on.
    """

    def __init__(self, gpu: str | GPU | None = None, say: Callable[[str], object] = print):
        self.gpu = None if gpu is None else as_gpu(gpu)
        self.say = say
        self.facts: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **given):
        """Plan the step, and say what it needs."""
        if not state.is_world_process_zero:
            return
        try:
            self._plan(args, given["model"], given["optimizer"], given["train_dataloader"])
        except NotImplementedError as error:
            self._tell(f"this training is not planned: {error}")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            if OUT_OF_MEMORY_OBSERVER is not None:
                OUT_OF_MEMORY_OBSERVER(self._explain)

    def on_train_end(self, args, state, control, **given):
        """Say how far the plan was from what the GPU reserved."""
        if "reserved" not in self.facts or not torch.cuda.is_available():
            return
        measured, planned = torch.cuda.max_memory_reserved(), self.facts["reserved"]
        self.facts["measured"] = measured
        off = 100 * (planned - measured) / measured
        self._tell(
            f"PyTorch reserved {size(measured)}; the plan for the longest batch said "
            f"{size(planned)} ({off:+.1f} %)."
        )

    def _plan(self, args: TrainingArguments, model: nn.Module, optimizer: Any, loader: Any) -> None:
        gpu = self.gpu or here()
        if gpu.capability == (0, 0):
            raise NotImplementedError('there is no GPU here; PlanCallback(gpu="T4") names one.')
        _check(args, model)
        step = _TrainerStep(args, model, optimizer, _longest_batch(loader))
        planned = step.plan(gpu)
        fit, peaks = planned.fits(gpu), planned.allocator_peaks(gpu)
        self.facts |= {
            "gpu": gpu.name,
            "memory": gpu.memory,
            "batch": step.shape,
            "need": fit.need,
            "fits": bool(fit),
            "allocated": peaks.allocated,
            "reserved": peaks.reserved,
            "seconds": step.seconds(planned, gpu),
        }
        self._tell(self._verdict())
        if not fit:
            self._tell(_advice(step, gpu))

    def _verdict(self) -> str:
        facts, shape = self.facts, " × ".join(map(str, self.facts["batch"]))
        end = "it fits" if facts["fits"] else "it will run out of memory"
        taken = f" A step takes about {span(facts['seconds'])}." if facts["seconds"] else ""
        return (
            f"with the longest batch of the data set ({shape}) a step needs {size(facts['need'])} "
            f"of the {size(facts['memory'])} of {facts['gpu']}: {end}.{taken}"
        )

    def _explain(self, device: int, asked: int, allocated: int, free: int) -> None:
        """Told by PyTorch where an allocation fails (numbers in bytes), before it raises."""
        held = f"PyTorch holds {size(allocated)}, and {size(asked)} more were asked for"
        if "need" not in self.facts:
            self._tell(f"out of memory: {held}.")
        elif self.facts["fits"]:
            self._tell(
                f"out of memory, although the training step needs only {size(self.facts['need'])} "
                f"by plan: {held}. Something else takes the memory: another process on this GPU, "
                "or evaluation, which is not planned."
            )
        else:
            self._tell(f"out of memory, as planned ({size(self.facts['need'])}): {held}.")

    def _tell(self, line: str) -> None:
        self.say(f"tight-fit: {line}")


class _TrainerStep:
    """A Trainer's step on copies without values."""

    def __init__(self, args: TrainingArguments, model: nn.Module, optimizer: Any, batch: Mapping):
        self.args, self.model, self.batch = args, model, batch
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # out of Accelerate's wrapper
        self.accumulation = args.gradient_accumulation_steps
        self.shape = list(shape_of(batch) or ())

    def plan(self, gpu: GPU, halvings: int = 0, checkpointing: bool = False, most=MICRO_BATCHES):
        """The plan with a batch that is halved so many times, and with checkpointing."""

        def setup():
            model, optimizer = self._twins(checkpointing)
            batch = {name: _halved(_twin(value), halvings) for name, value in self._tensors()}
            rest = {k: v for k, v in self.batch.items() if not isinstance(v, torch.Tensor)}
            scaler = torch.amp.GradScaler("cuda") if self.args.fp16 else None
            parts = min(self.accumulation << halvings, most)

            def step():
                for _ in range(parts):
                    loss = self._loss(model, {**batch, **rest}) / parts
                    (scaler.scale(loss) if scaler else loss).backward()
                    del loss
                if scaler:
                    scaler.unscale_(optimizer)
                if self.args.max_grad_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
                scaler.step(optimizer) if scaler else optimizer.step()
                if scaler:
                    scaler.update()
                model.zero_grad()

            return [model, *batch.values()], step

        return plan_custom_step(setup, flash=gpu.capability >= (8, 0))

    def seconds(self, planned: CustomStepPlan, gpu: GPU) -> float | None:
        """Of all micro-batches; None where the time of this GPU is not known."""
        planned.operations.tf32 = torch.get_float32_matmul_precision() != "highest"
        try:
            taken = planned.seconds(gpu).total
            if self.accumulation > MICRO_BATCHES:
                one = self.plan(gpu, most=1)
                one.operations.tf32 = planned.operations.tf32
                each = (taken - one.seconds(gpu).total) / (MICRO_BATCHES - 1)
                taken += (self.accumulation - MICRO_BATCHES) * each
        except (ValueError, KeyError):
            return None
        return taken

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(k, v) for k, v in self.batch.items() if isinstance(v, torch.Tensor)]

    def _loss(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        outputs = model(**batch)
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]

    def _twins(self, checkpointing: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Copies of model and optimizer on a planned GPU; nothing of the real ones is changed."""
        memo: dict[int, Any] = {}
        for module in self.model.modules():
            for value in (*module._parameters.values(), *module._buffers.values()):
                if value is not None and id(value) not in memo:
                    memo[id(value)] = _twin(value)
            for value in vars(module).values():
                if isinstance(value, torch.Tensor):
                    memo.setdefault(id(value), _twin(value))
        model: Any = copy.deepcopy(self.model, memo)
        if checkpointing:
            model.gradient_checkpointing_enable()
        self._as_accelerate(model)
        optimizer = copy.copy(self.optimizer)
        optimizer.__dict__.pop("step", None)  # a scheduler's, which steps the real optimizer
        optimizer.param_groups = [
            {**group, "params": [memo[id(parameter)] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        optimizer.state = type(self.optimizer.state)(dict)
        for parameter, held in self.optimizer.state.items():
            optimizer.state[memo[id(parameter)]] = {
                name: _twin(value) if isinstance(value, torch.Tensor) else value
                for name, value in held.items()
            }
        return model.train(), optimizer

    def _as_accelerate(self, model: nn.Module) -> None:
        """Autocast for CUDA around the forward pass, and outputs in fp32, as Accelerate has it."""
        if (plain := vars(model).pop("_original_forward", None)) is not None:
            model.forward = plain
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(_precision(self.args))
        if dtype is None:
            return
        plain = model.forward

        def forward(*args, **kwargs):
            with torch.autocast("cuda", dtype):
                return plain(*args, **kwargs)

        model.forward = convert_outputs_to_fp32(forward)


def _precision(args: TrainingArguments) -> str:
    return "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"


def _check(args: TrainingArguments, model: nn.Module) -> None:
    """Raises NotImplementedError for what is not one process's plain step."""
    if args.world_size > 1 or args.n_gpu > 1:
        raise NotImplementedError(
            "several GPUs train it; `tight-fit MODEL --layout ddp=2` plans a rank of them."
        )
    if args.label_smoothing_factor:
        raise NotImplementedError("label smoothing computes another loss than the model's own.")
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise NotImplementedError(
                f"{name} is a {type(parameter).__name__}; `tight-fit script` plans the program."
            )


def _longest_batch(loader: Any) -> Mapping[str, Any]:
    """The largest batch that a loader can give; random numbers are drawn as if none were."""
    with _random_numbers_kept():
        longest = find_longest(loader)
        if longest is None:
            raise NotImplementedError(
                "the data set has no length, so its longest batch is unknown."
            )
        batch = longest.batch
        if batch is None:  # all examples have one size
            count = loader.batch_size or loader.batch_sampler.batch_size
            some = [loader.dataset[index] for index in range(min(count, len(loader.dataset)))]
            batch = loader.collate_fn(some)
    if not isinstance(batch, Mapping):
        raise NotImplementedError("its batches are no dictionaries of tensors.")
    return dict(batch)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the planned GPU, without values."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).cuda()
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _halved(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return tensor[: max(1, len(tensor) >> times)].clone() if times and tensor.dim() else tensor


def _advice(step: _TrainerStep, gpu: GPU) -> str:
    """The changes of TrainingArguments with which the step fits, each planned."""
    args, found = step.args, []
    size_of_batch = args.per_device_train_batch_size
    can_recompute = getattr(step.model, "supports_gradient_checkpointing", False)
    tried = [(0, True)] if can_recompute and not args.gradient_checkpointing else []
    tried += [(times, False) for times in range(1, REMEDIES + 1)]
    if tried[:1] == [(0, True)]:
        tried += [(times, True) for times in range(1, REMEDIES + 1)]
    for halvings, checkpointing in tried:
        if size_of_batch % (1 << halvings):
            continue
        fit: Fit = step.plan(gpu, halvings, checkpointing).fits(gpu)
        if fit:
            changes = ["gradient_checkpointing=True"] if checkpointing else []
            if halvings:
                changes += [
                    f"per_device_train_batch_size={size_of_batch >> halvings}",
                    f"gradient_accumulation_steps={step.accumulation << halvings}",
                ]
            found.append(f"{', '.join(changes)} ({size(fit.need)})")
            if halvings:
                break
    if not found:
        return "neither smaller batches nor gradient_checkpointing=True make it fit."
    return f"it fits with {'; or with '.join(found)}."
