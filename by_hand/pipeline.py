"""One rank's step in a pipeline: activations go forward to the next rank, gradients come back.

    stages = cut(model, 2)
    done = run(one_f_one_b(2, 4), [stages[transport.rank]], transport, micro_batches)

Every rank is given all micro-batches: the first stage reads their inputs, the last their labels,
and the others need their sizes. See GPipe (Huang et al. 2018) and PipeDream-flush (Narayanan et al.
2020) for the schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from by_hand.collectives import ring_all_reduce
from by_hand.pipeline_runner import ActivationMeter, ScheduleRunner, StageMail
from by_hand.pipeline_stage import SHARED, Stage
from by_hand.timeline import Span
from by_hand.transport import Transport
from tight_fit.layouts.schedules import Schedule
from tight_fit.techniques.settings import StepSettings
from tight_fit.techniques.step import Batch


@dataclass(frozen=True)
class PipelineStep:
    """What a rank did in one step.

    losses  scalars, one per micro-batch, whose sum is the step's mean loss; on the rank of the last
            stage only, else empty
    spans   when the rank worked, in seconds of `time.perf_counter`
    held    {stage: the most bytes of activations held at once}; empty unless asked for
    """

    losses: list[Tensor]
    spans: list[Span]
    held: dict[int, int]


def run(
    schedule: Schedule,
    stages: Sequence[Stage],
    transport: Transport,
    batches: Sequence[Batch],
    examples: int | None = None,
    recipe: StepSettings | None = None,
    weigh: bool = False,
    phase: Callable[[str], None] = lambda name: None,
) -> PipelineStep:
    """Do one rank's part of a step: gradients are added to `.grad` of its stages' parameters.

    They are the gradients that backward passes through the whole model would give.

    stages    this rank's own, in order
    batches   all micro-batches of the step, on every rank; they may differ in their examples
    examples  what each loss, a sum over examples, is divided by; None: the examples of all batches
    recipe    for its precision; None computes in fp32
    weigh     count the bytes of activations held
    phase     is called with "forward" or "backward" as each action begins
    Raises ValueError for a schedule, batches or stages that do not fit together.
    """
    _check(schedule, stages, transport, batches)
    meter = ActivationMeter(stages) if weigh else None
    mail = StageMail(schedule, stages, transport, batches)
    examples = examples or sum(len(batch["labels"]) for batch in batches)
    runner = ScheduleRunner(stages, mail, batches, examples, recipe, meter)
    for action in schedule.actions[transport.rank]:
        phase("forward" if action.kind == "F" else "backward")
        runner.run(action)
    share_gradients(stages, transport)
    transport.finish()
    return PipelineStep(runner.losses, runner.spans, meter.most if meter else {})


def _check(
    schedule: Schedule, stages: Sequence[Stage], transport: Transport, batches: Sequence[Batch]
) -> None:
    if len(batches) != schedule.micro_batches or transport.ranks != schedule.ranks:
        raise ValueError(
            f"{schedule.name} is for {schedule.ranks} ranks and {schedule.micro_batches} "
            f"micro-batches, not for {transport.ranks} and {len(batches)}: make the schedule with "
            "the numbers that you have."
        )
    due = list(range(transport.rank, schedule.stages, schedule.ranks))
    indices = [stage.index for stage in stages]
    if indices != due or any(stage.stages != schedule.stages for stage in stages):
        raise ValueError(
            f"Rank {transport.rank} needs the stages {due} of {schedule.stages} for "
            f"{schedule.name}: pass cut(model, {schedule.stages})[rank::{schedule.ranks}]."
        )
    if any(action.version is not None for action in schedule.actions[transport.rank]):
        raise ValueError(
            f"{schedule.name} changes weights on the way: use a schedule that ends with a flush, "
            "such as one_f_one_b."
        )


def share_gradients(stages: Sequence[Stage], transport: Transport) -> None:
    """Sum the gradients of the parameters that every stage has a copy of, over all ranks, in place.

    Does nothing for a model without such parameters, or where they are frozen.
    """
    copies = [stage.shared() for stage in stages]
    if not copies[0] or not copies[0][0].requires_grad:
        return
    gradients = [[value.grad for value in own if value.grad is not None] for own in copies]
    flat = [torch.cat([gradient.flatten() for gradient in own]) for own in gradients]
    total = ring_all_reduce(transport, torch.stack(flat).sum(0))
    for own in gradients:
        for gradient, part in zip(own, total.split([gradient.numel() for gradient in own])):
            gradient.copy_(part.view_as(gradient))


def clip_gradients(stages: Sequence[Stage], transport: Transport, max_norm: float) -> float:
    """Clip the gradients of all ranks together to the L2 norm `max_norm`, in place.

    Parameters that every stage has a copy of count once. Returns the norm before. The same as
    `torch.nn.utils.clip_grad_norm_` for the whole model.
    """
    counted = [
        value.grad
        for stage in stages
        for name, value in stage.named_parameters()
        if value.grad is not None and (stage.first or not name.startswith(SHARED))
    ]
    zero = torch.zeros((), device=stages[0].device)
    squares = sum((gradient.norm() ** 2 for gradient in counted), zero)
    norm = ring_all_reduce(transport, squares.reshape(1)).sqrt()
    for stage in stages:
        for value in stage.parameters():
            if value.grad is not None:
                value.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.item()
