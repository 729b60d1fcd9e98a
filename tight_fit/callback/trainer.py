"""`PlanCallback`: what a step of transformers' Trainer will need, said before the first one.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PlanCallback()])

The Trainer's own model and optimizer are copied without values, and its step (forward, backward,
clipping, update) is planned on the longest batch that the data set can give. Where it will not fit,
the changes are named that make it fit. After the training, the plan stands beside what the GPU
reserved; where the GPU runs out of memory, a line says what the plan expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from tight_fit.callback.shared import REMEDIES, CopiedStep, Teller, check_weights, longest_batch
from tight_fit.gpus import GPU
from tight_fit.memory.plan import Fit
from tight_fit.units import size


class PlanCallback(Teller, TrainerCallback):
    """Plan a Trainer's step before its first one, and compare the plan with the GPU at the end.

    >>> from tight_fit import PlanCallback
    >>> PlanCallback("2080 ti").gpu.name  # goes into the Trainer's `callbacks`
    'RTX 2080 Ti'

    gpu    the GPU to plan for, a name, a size ("16GB") or a `GPU`; None takes the one that is here
    say    what a line is given to; `print` by default
    facts  what was planned and measured, for dashboards, as JSON holds it: {"gpu", "memory",
           "batch" (shape), "need", "terms" (of it), "fits", "allocated", "reserved", "seconds" (or
           None), "measured"}, in bytes and seconds

    The step of one process is planned, uncompiled, with the model's own loss; weights of
    bitsandbytes in 4 bits as they are. Raises ValueError for an unknown GPU. What cannot be
    planned is said in one line, and training goes on.
    """

    def on_train_begin(self, args, state, control, **given):
        """Plan the step, and say what it needs."""
        if not state.is_world_process_zero:
            return

        def step() -> _TrainerStep:
            _check(args, given["model"])
            batch = longest_batch(given["train_dataloader"])
            if not isinstance(batch, Mapping):
                raise NotImplementedError("its batches are no dictionaries of tensors.")
            return _TrainerStep(args, given["model"], given["optimizer"], batch)

        self.begin(step, _advice)

    def on_train_end(self, args, state, control, **given):
        """Say how far the plan was from what the GPU reserved."""
        self.end()


class _TrainerStep(CopiedStep):
    def __init__(self, args: TrainingArguments, model: nn.Module, optimizer: Any, batch: Mapping):
        plain = getattr(optimizer, "optimizer", optimizer)  # out of Accelerate's wrapper
        super().__init__(model, plain, dict(batch), args.gradient_accumulation_steps)
        self.args = args

    def of(self, model: Any, optimizer: Any, batch: Any, parts: int) -> Callable[[], object]:
        """Forward and backward passes, clipping and update."""
        scaler = torch.amp.GradScaler("cuda") if self.args.fp16 else None

        def step() -> None:
            for _ in range(parts):
                loss = self._loss(model, batch) / parts
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

        return step

    def _loss(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        outputs = model(**batch)
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]

    def prepare(self, model: Any, checkpointing: bool) -> None:
        """Autocast for CUDA around the forward pass, and outputs in fp32, as Accelerate has it."""
        if checkpointing:
            model.gradient_checkpointing_enable()
        if (plain := vars(model).pop("_original_forward", None)) is not None:
            model.forward = plain
        if not (self.args.fp16 or self.args.bf16):
            return
        dtype = torch.float16 if self.args.fp16 else torch.bfloat16
        plain = model.forward

        def forward(*args, **kwargs):
            with torch.autocast("cuda", dtype):
                return plain(*args, **kwargs)

        model.forward = convert_outputs_to_fp32(forward)


def _check(args: TrainingArguments, model: nn.Module) -> None:
    """Raises NotImplementedError for what is not one process's plain step."""
    if args.world_size > 1 or args.n_gpu > 1:
        raise NotImplementedError(
            "several GPUs train it; `tight-fit MODEL --layout ddp=2` plans a rank of them."
        )
    if args.label_smoothing_factor:
        raise NotImplementedError("label smoothing computes another loss than the model's own.")
    check_weights(model)


def _advice(step: Any, gpu: GPU) -> str:
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
