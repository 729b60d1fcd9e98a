"""The loop of all pretraining: AdamW, a schedule, gradients clipped to a norm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_linear_schedule_with_warmup


@dataclass(frozen=True)
class Pretraining:
    """What every pretraining run has; `warmup` is the fraction of the steps that warm up."""

    steps: int = 1000
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0


def optimize(
    model: nn.Module,
    losses: Iterable[dict[str, Tensor]],
    plan: Pretraining,
    stop: int | None = None,
    schedule_of: Callable[..., Any] = get_linear_schedule_with_warmup,
    **adamw: Any,
) -> list[dict[str, float]]:
    """The losses of each step by name, rounded to five places; a line every hundred steps.

    losses       endless: those of the next step, whose sum is minimised
    stop         the number of steps to take of `plan.steps`; None takes all
    schedule_of  makes a schedule from an optimizer, the steps of its warm-up and all steps
    adamw        further options of AdamW
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay, **adamw
    )
    schedule = schedule_of(optimizer, round(plan.warmup * plan.steps), plan.steps)
    log: list[dict[str, float]] = []
    begin = time.perf_counter()
    for step, parts in zip(range(stop or plan.steps), losses):
        sum(parts.values(), torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        log.append({name: round(loss.item(), 5) for name, loss in parts.items()})
        if step % 100 == 99:
            seconds = time.perf_counter() - begin
            print(f"step {step + 1:5d}  {seconds:6.0f} s  {log[-1]}", flush=True)
    return log
