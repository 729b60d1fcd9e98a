"""The loop of all pretraining: AdamW, a schedule, gradients clipped to a norm."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    losses: Iterable[dict[str, Tensor]],
    plan: Any,
    stop: int | None = None,
) -> list[dict[str, float]]:
    """The losses of each step by name, rounded to five places; a line every hundred steps.

    losses  endless: those of the next step, whose sum is minimised
    plan    has `steps`, their number, and `max_grad_norm`
    stop    the number of steps to take of them; None takes all
    """
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
