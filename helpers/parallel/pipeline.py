"""One rank's work on its stages of a model: activations go forward over a wire, gradients come back.

    mine = cut(model, stages=2)[wire.rank]            # the rest of the model may be forgotten
    step = run(one_f_one_b(2, 4), [mine], wire, micro_batches, rows)

Every rank knows the sizes of all micro-batches; the first reads their inputs, the last their labels.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from helpers.parallel.collectives import ring_all_reduce
from helpers.parallel.pipeline_stage import SHARED, Batch, Stage
from helpers.parallel.schedules import Action, Schedule, Span
from helpers.parallel.transport import ProcessGroupTransport, Transport
from helpers.recipe import Recipe
from helpers.step import autocast


@dataclass
class PipelineStep:
    """What a rank did in one step.

    losses  of each micro-batch, its share of the step's mean; on the last stage's rank only
    spans   when it worked, in seconds of time.perf_counter
    held    {stage: most bytes of activations at once}, if asked
    """

    losses: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)


def run(
    schedule: Schedule,
    stages: Sequence[Stage],
    transport: Transport,
    batches: Sequence[Batch],
    rows: int | None = None,
    recipe: Recipe | None = None,
    weigh: bool = False,
    phase: Callable[[str], None] = lambda name: None,
) -> PipelineStep:
    """Do one rank's actions: gradients are added to its stages' `.grad`, as the whole model's backward passes would.

    stages   this rank's own, in order
    batches  all micro-batches of the step, on every rank; they may differ in rows
    rows     what each loss, a sum over rows, is divided by; None takes the rows of all batches
    recipe   for its precision; None computes in fp32
    weigh    count the bytes of activations held
    phase    is told "forward" and "backward" as they begin
    Raises ValueError for a schedule, batches or stages that do not fit together.
    """
    if len(batches) != schedule.micro_batches or transport.ranks != schedule.ranks:
        raise ValueError(
            f"{schedule.name} is for {schedule.ranks} ranks and {schedule.micro_batches} micro-batches, "
            f"not for {transport.ranks} and {len(batches)}."
        )
    due = list(range(transport.rank, schedule.stages, schedule.ranks))
    if [stage.index for stage in stages] != due or any(
        stage.stages != schedule.stages for stage in stages
    ):
        raise ValueError(
            f"Rank {transport.rank} needs the stages {due} of {schedule.stages} for {schedule.name}."
        )
    if any(action.version is not None for action in schedule.actions[transport.rank]):
        raise ValueError(f"{schedule.name} changes weights on the way: here runs what has a flush.")
    rank = _ScheduleRunner(
        schedule,
        stages,
        transport,
        batches,
        rows or sum(len(batch["labels"]) for batch in batches),
        recipe,
        weigh,
    )
    for action in schedule.actions[transport.rank]:
        phase("forward" if action.kind == "F" else "backward")
        rank.act(action)
    share_gradients(stages, transport)
    getattr(transport, "finish", lambda: None)()
    return rank.step


def share_gradients(stages: Sequence[Stage], transport: Transport) -> None:
    """Sum the gradients of what all stages have a copy of, over the stages of all ranks. In place."""
    copies = [stage.shared() for stage in stages]
    if not copies[0] or not copies[0][0].requires_grad:
        return
    flat = [torch.cat([value.grad.flatten() for value in own]) for own in copies]
    total = ring_all_reduce(transport, torch.stack(flat).sum(0))
    for own in copies:
        for value, part in zip(own, total.split([value.numel() for value in own])):
            value.grad.copy_(part.view_as(value))


def clip_gradients(stages: Sequence[Stage], transport: Transport, most: float) -> float:
    """Clip to the L2 norm `most` of the gradients of all ranks together, shared ones once. Returns the norm before."""
    own = [
        value.grad
        for stage in stages
        for name, value in stage.named_parameters()
        if value.grad is not None and (stage.first or not name.startswith(SHARED))
    ]
    squares = sum((grad.norm() ** 2 for grad in own), torch.zeros((), device=stages[0].device))
    norm = ring_all_reduce(transport, squares.reshape(1)).sqrt()
    for stage in stages:
        for value in stage.parameters():
            if value.grad is not None:
                value.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm.item()


class PipelineTransport(ProcessGroupTransport):
    """A ProcessGroupTransport for pipelines: NCCL gets a communicator for each direction between two ranks. It works through the
    messages of one communicator in order, so two ranks that both send first would wait for each other for ever."""

    def __init__(self):
        super().__init__()
        pairs = itertools.permutations(range(self.ranks), 2) if dist.get_backend() == "nccl" else ()
        self._lanes = {pair: dist.new_group(list(pair)) for pair in pairs}

    def _send(self, tensor: Tensor, to: int) -> None:
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]
        tensor = tensor.clone()
        self._pending.append(
            (dist.isend(tensor, to, group=self._lanes.get((self.rank, to))), tensor)
        )

    def _receive(self, like: Tensor, of: int) -> Tensor:
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(tensor, of, group=self._lanes.get((of, self.rank)))
        return tensor


class _ScheduleRunner:
    def __init__(self, schedule, stages, transport, batches, rows, recipe, weigh):
        self.schedule, self.transport, self.batches, self.rows, self.recipe = (
            schedule,
            transport,
            batches,
            rows,
            recipe,
        )
        self.stages = {stage.index: stage for stage in stages}
        self.step, self.kept, self.mail = PipelineStep(), {}, {}
        self.known = (
            {value.data_ptr() for stage in stages for value in stage.parameters()}
            if weigh
            else None
        )
        self.alive = dict.fromkeys(self.stages, 0)
        # What each other rank will send here, in its order: then one wire serves for everything.
        self.coming = {
            other: deque(
                message
                for action in own
                for message in [self.message(action)]
                if message and self.owner(message) == transport.rank
            )
            for other, own in enumerate(schedule.actions)
            if other != transport.rank
        }

    def owner(self, message: tuple[str, int, int]) -> int:
        return self.schedule.rank_of(message[2])

    def message(self, action: Action) -> tuple[str, int, int] | None:
        """What an action's result is for: (kind, micro-batch, stage that waits for it)."""
        if action.kind == "W":
            return None
        to = action.stage + (1 if action.kind == "F" else -1)
        return (action.kind, action.micro_batch, to) if 0 <= to < self.schedule.stages else None

    def post(self, action: Action, tensors: Sequence[Tensor]) -> None:
        message = self.message(action)
        if message and self.owner(message) == self.transport.rank:
            self.mail[message] = [tensor.detach() for tensor in tensors]
        elif message:
            for tensor in tensors:
                self.transport.send(tensor, self.owner(message))

    def fetch(self, action: Action, of: int) -> list[Tensor]:
        """What an action waits for, from the rank that works on stage `of`."""
        wanted, sender = (action.kind, action.micro_batch, action.stage), self.schedule.rank_of(of)
        while wanted not in self.mail:
            kind, m, stage = message = self.coming[sender].popleft()
            like = self.stages[stage].arrives(self.batches[m])
            self.mail[message] = [
                self.transport.receive(one, sender) for one in (like if kind == "F" else like[:1])
            ]
        return self.mail.pop(wanted)

    def act(self, action: Action) -> None:
        stage, arrived = self.stages[action.stage], None
        if action.kind == "F" and not stage.first:
            arrived = self.fetch(action, action.stage - 1)
        elif action.kind in "BI" and not stage.last:
            arrived = self.fetch(action, action.stage + 1)
        begin = _now(stage)
        work = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[
            action.kind
        ]
        result = work(stage, action, arrived)
        self.step.spans.append(Span(action, begin, _now(stage)))
        self.post(action, result)

    def forward(
        self, stage: Stage, action: Action, arrived: list[Tensor] | None
    ) -> Sequence[Tensor]:
        batch = self.batches[action.micro_batch]
        if arrived:
            arrived[0].requires_grad_()
        inputs = arrived or [{name: value for name, value in batch.items() if name != "labels"}]
        saved: dict[int, int] = {}
        with (
            self.weighing(saved),
            autocast(self.recipe, stage.device) if self.recipe else _nothing(),
        ):
            given = stage(*inputs)
            if stage.last:
                given = F.cross_entropy(given.float(), batch["labels"], reduction="sum") / self.rows
                self.step.losses.append(given.detach())
        outputs = [given] if stage.last else list(given)
        self.kept[stage.index, action.micro_batch] = (
            arrived[0] if arrived else None,
            outputs[0],
            saved,
        )
        self.alive[stage.index] += sum(saved.values())
        if self.known is not None:
            self.step.held[stage.index] = max(
                self.step.held.get(stage.index, 0), self.alive[stage.index]
            )
        return outputs

    def backward(
        self, stage: Stage, action: Action, arrived: list[Tensor] | None
    ) -> Sequence[Tensor]:
        given, output, saved = self.kept.pop((stage.index, action.micro_batch))
        if output.requires_grad:  # else all of it is frozen
            torch.autograd.backward(output, arrived[0] if arrived else None)
        self.alive[stage.index] -= sum(saved.values())
        return (
            []
            if given is None
            else [given.grad if given.grad is not None else torch.zeros_like(given)]
        )

    def inputs(
        self, stage: Stage, action: Action, arrived: list[Tensor] | None
    ) -> Sequence[Tensor]:
        """The first part of a backward pass; the second, `weights`, goes through the layers once more. (torch's own
        zero-bubble schedules keep what the first has found instead.)"""
        key = stage.index, action.micro_batch
        given, output, saved = self.kept[key]
        self.kept[key] = given, output, saved, arrived
        if given is None:
            return []
        return torch.autograd.grad(
            output, given, arrived[0] if arrived else None, retain_graph=True
        )

    def weights(self, stage: Stage, action: Action, _) -> Sequence[Tensor]:
        given, output, saved, arrived = self.kept.pop((stage.index, action.micro_batch))
        trained = [value for value in stage.parameters() if value.requires_grad]
        if trained and output.requires_grad:
            torch.autograd.backward(output, arrived[0] if arrived else None, inputs=trained)
        self.alive[stage.index] -= sum(saved.values())
        return []

    def weighing(self, saved: dict[int, int]):
        if self.known is None:
            return _nothing()

        def note(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in self.known:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        return saved_tensors_hooks(note, lambda tensor: tensor)


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def _now(stage: Stage) -> float:
    if stage.device.type == "cuda":
        torch.cuda.current_stream(
            stage.device
        ).synchronize()  # not the messages, whose sends may wait for us
    return time.perf_counter()
