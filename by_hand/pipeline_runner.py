"""The parts of a pipeline's rank: its messages, its activations, its actions one by one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from by_hand.pipeline_stage import Stage
from by_hand.timeline import Span
from by_hand.transport import Transport
from tight_fit.layouts.schedules import Action, Schedule, consumer
from tight_fit.techniques.settings import StepSettings
from tight_fit.techniques.step import Batch, autocast


class StageMail:
    """The results that a rank's stages exchange with their neighbours, on this rank or another.

    Messages carry no labels. A rank knows the order in which another sends, from the schedule, and
    receives in this order; what comes before it is needed is kept. A message is named by the
    action that consumes it.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        transport: Transport,
        batches: Sequence[Batch],
    ):
        self._schedule, self._transport, self._batches = schedule, transport, batches
        self._stages = {stage.index: stage for stage in stages}
        self._kept: dict[Action, list[Tensor]] = {}
        self._expected = {
            sender: deque(self._messages_from(sender))
            for sender in range(schedule.ranks)
            if sender != transport.rank
        }

    def _messages_from(self, sender: int) -> list[Action]:
        """What another rank sends to this one, in its order."""
        messages = [
            consumer(action, self._schedule.stages) for action in self._schedule.actions[sender]
        ]
        return [
            message
            for message in messages
            if message and self._schedule.rank_of(message.stage) == self._transport.rank
        ]

    def post(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Hand the result of an action to the action that waits for it, if there is one."""
        message = consumer(action, self._schedule.stages)
        if message is None:
            return
        receiver = self._schedule.rank_of(message.stage)
        if receiver == self._transport.rank:
            self._kept[message] = [tensor.detach() for tensor in tensors]
        else:
            for tensor in tensors:
                self._transport.send(tensor, receiver)

    def fetch(self, action: Action, neighbour: int) -> list[Tensor]:
        """What an action waits for, from stage `neighbour`.

        For "F" the hidden states and, for DeBERTa, the mask; else the hidden states' gradient.
        """
        wanted, sender = action._replace(version=None), self._schedule.rank_of(neighbour)
        while wanted not in self._kept:
            message = self._expected[sender].popleft()
            like = self._stages[message.stage].arrives(self._batches[message.micro_batch])
            self._kept[message] = [
                self._transport.receive(tensor, sender)
                for tensor in (like if message.kind == "F" else like[:1])
            ]
        return self._kept.pop(wanted)


class ActivationMeter:
    """Bytes of activations that each stage of a rank holds for its backward passes.

    `most` is {stage: the most bytes at once}. Parameters, which autograd saves too, do not count.
    """

    def __init__(self, stages: Sequence[Stage]):
        self.most: dict[int, int] = {}
        self._held = {stage.index: 0 for stage in stages}
        self._saved: dict[tuple[int, int], int] = {}
        self._parameters = {value.data_ptr() for stage in stages for value in stage.parameters()}

    @contextmanager
    def saving(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Counts what a forward pass inside it saves; a storage saved twice counts once."""
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._parameters:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self._saved[stage, micro_batch] = sum(sizes.values())
        self._held[stage] += self._saved[stage, micro_batch]
        self.most[stage] = max(self.most.get(stage, 0), self._held[stage])

    def release(self, stage: int, micro_batch: int) -> None:
        """The backward pass of a micro-batch is done."""
        self._held[stage] -= self._saved.pop((stage, micro_batch))


@dataclass
class _Passed:
    """What a stage keeps of a micro-batch between its forward and its backward pass."""

    hidden: Tensor | None  # that came in; None on the first stage
    output: Tensor  # hidden states, or the loss on the last stage
    gradient: Tensor | None = None  # of the output, kept for the weights' part of a backward pass


class ScheduleRunner:
    """Does a rank's actions one by one. `losses` and `spans` record them in their order.

    batches   all micro-batches of the step
    examples  what each loss, a sum over examples, is divided by
    recipe    for its precision; None computes in fp32
    meter     counts the activations, if given
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        mail: StageMail,
        batches: Sequence[Batch],
        examples: int,
        recipe: StepSettings | None = None,
        meter: ActivationMeter | None = None,
    ):
        self._stages = {stage.index: stage for stage in stages}
        self._mail, self._batches, self._examples = mail, batches, examples
        self._recipe, self._meter = recipe, meter
        self._passed: dict[tuple[int, int], _Passed] = {}
        self.losses: list[Tensor] = []
        self.spans: list[Span] = []

    def run(self, action: Action) -> None:
        """Wait for what the action needs, do it and hand on its result. Waiting is in no span."""
        stage = self._stages[action.stage]
        arrived: list[Tensor] = []
        if action.kind == "F" and not stage.first:
            arrived = self._mail.fetch(action, action.stage - 1)
        elif action.kind in "BI" and not stage.last:
            arrived = self._mail.fetch(action, action.stage + 1)
        work = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
        }[action.kind]
        begin = _now(stage)
        result = work(stage, action.micro_batch, arrived)
        self.spans.append(Span(action, begin, _now(stage)))
        self._mail.post(action, result)

    def _forward(self, stage: Stage, micro_batch: int, arrived: list[Tensor]) -> list[Tensor]:
        batch = self._batches[micro_batch]
        inputs: list[Any] = list(arrived)
        if arrived:
            arrived[0].requires_grad_()
        else:
            inputs = [{name: value for name, value in batch.items() if name != "labels"}]
        with self._metered(stage, micro_batch), self._autocast(stage):
            output = stage(*inputs)
            if stage.last:
                labels = batch["labels"]
                output = F.cross_entropy(output.float(), labels, reduction="sum") / self._examples
                self.losses.append(output.detach())
        outputs = [output] if stage.last else list(output)
        hidden = arrived[0] if arrived else None
        self._passed[stage.index, micro_batch] = _Passed(hidden, outputs[0])
        return outputs

    def _backward(self, stage: Stage, micro_batch: int, arrived: list[Tensor]) -> list[Tensor]:
        passed = self._passed.pop((stage.index, micro_batch))
        if passed.output.requires_grad:  # else everything up to here is frozen
            torch.autograd.backward(passed.output, arrived[0] if arrived else None)
        self._release(stage, micro_batch)
        if passed.hidden is None:
            return []
        gradient = passed.hidden.grad
        return [gradient if gradient is not None else torch.zeros_like(passed.hidden)]

    def _backward_inputs(
        self, stage: Stage, micro_batch: int, arrived: list[Tensor]
    ) -> list[Tensor]:
        """The first part of a backward pass: the gradient of the hidden states that came in.

        The second part goes through the layers once more; torch's own zero-bubble schedules keep
        what the first part has computed instead.
        """
        passed = self._passed[stage.index, micro_batch]
        passed.gradient = arrived[0] if arrived else None
        if passed.hidden is None:
            return []
        return list(
            torch.autograd.grad(passed.output, passed.hidden, passed.gradient, retain_graph=True)
        )

    def _backward_weights(
        self, stage: Stage, micro_batch: int, arrived: list[Tensor]
    ) -> list[Tensor]:
        """The second part of a backward pass: adds to the gradients of the weights."""
        passed = self._passed.pop((stage.index, micro_batch))
        trained = [value for value in stage.parameters() if value.requires_grad]
        if trained and passed.output.requires_grad:
            torch.autograd.backward(passed.output, passed.gradient, inputs=trained)
        self._release(stage, micro_batch)
        return []

    def _metered(self, stage: Stage, micro_batch: int) -> AbstractContextManager[None]:
        return self._meter.saving(stage.index, micro_batch) if self._meter else nullcontext()

    def _release(self, stage: Stage, micro_batch: int) -> None:
        if self._meter:
            self._meter.release(stage.index, micro_batch)

    def _autocast(self, stage: Stage) -> AbstractContextManager:
        return autocast(self._recipe, stage.device) if self._recipe else nullcontext()


def _now(stage: Stage) -> float:
    """Seconds, once the GPU has done its work."""
    if stage.device.type == "cuda":
        # Only the work of this stream: sends on others may still wait for this rank to receive.
        torch.cuda.current_stream(stage.device).synchronize()
    return time.perf_counter()
