"""Where the steps of a program begin and end, and when its memory has settled."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tight_fit.gpus import WORKSPACE
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.memory.allocator import MAX_STEPS
from tight_fit.plans.own_step import GPURecorder, Replay
from tight_fit.script.evaluation import Evaluation
from tight_fit.script.loaders import Loaders
from tight_fit.script.watch import ScriptTracker
from tight_fit.torch_private import disable_current_modes
from tight_fit.trace.gpu_calls import Places
from tight_fit.trace.storage_trace import BORN, DIES, GRADIENTS, OPTIMIZER, PARAMETERS

LASTING = (PARAMETERS, GRADIENTS, OPTIMIZER)
FEW = 4096  # bytes that a step may leave behind: a hundred thousand steps are 0.4 GiB
FIRST_KEPT = 1  # the first step makes what all others use
LEAST = 3  # steps; optimizers make their states in the first one
REST = 3  # steps, or ends of its loader, in which a program that evaluates has begun to
AFTER_LONGEST = 3  # steps taken once the longest batch was drawn: some loaders draw one ahead


class Watch:
    """Follows the steps of the optimizer that steps first; others belong to its steps.

    ends       number of events at the end of each step
    optimizer  the one that counts
    regular    steps taken with batches as they came; those after it had the longest batch
    over       whether training is planned, and what comes after it is followed
    evaluation that is followed once training is over; None to leave it out
    operations what a GPU runs in the last regular step
    """

    def __init__(
        self,
        tracker: ScriptTracker,
        loaders: Loaders,
        finish: Callable[[Watch], None],
        steps: int | None = None,
        evaluation: Evaluation | None = None,
        followed: Callable[[], None] = lambda: None,
    ):
        self.tracker, self.loaders, self.finish, self.steps = tracker, loaders, finish, steps
        self.evaluation, self.followed = evaluation, followed
        self.over = False
        self.seen_before = 0  # calls of evaluations before training was over
        self.rest = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.kinds: list[str] = []
        self.ways: dict[str, str] = {}  # kind -> how it updates many tensors, "" where unknown
        self.without_gradient = [0, 0]  # parameters that got none at the last step, and all
        self.ends: list[int] = []
        self.regular = 0
        self.operations: TracedOps | None = None
        self.longest_operations: TracedOps | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, steps are followed."""
        handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.over:
            self._goes_on()
            return
        self.tracker.updating = True
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.tracker.name_gradients(one.grad for one in parameters if one.grad is not None)
        if self.optimizer in (None, optimizer):
            none = sum(one.grad is None for one in parameters)
            self.without_gradient = [none, len(parameters)]
        if type(optimizer).__name__ not in self.kinds:
            self.kinds.append(type(optimizer).__name__)
            self.ways[type(optimizer).__name__] = _way(optimizer, self.tracker.places)
            self._name_everything(optimizer)

    def _name_everything(self, optimizer: torch.optim.Optimizer) -> None:
        """Sort what is alive into categories, once an optimizer is known."""
        gc.collect()
        self.tracker.name_parameters(
            found for found in gc.get_objects() if isinstance(found, nn.Module)
        )
        groups = [group["params"] for group in optimizer.param_groups]
        self.tracker.watch(parameter for group in groups for parameter in group)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.over:
            return
        self.tracker.updating = False
        self.tracker.name_states(optimizer)
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is self.optimizer:
            with disable_current_modes():
                self._end_of_step()

    def _end_of_step(self) -> None:
        gc.collect()
        tracker, loaders = self.tracker, self.loaders
        self.ends.append(len(tracker.storage_trace.events))
        loaders.steps = len(self.ends)
        recorder = tracker.recorder
        operations = recorder.traced if recorder is not None else None
        tracker.recorder = GPURecorder(tracker.places)
        if not self.regular:
            self.operations = operations
            if not self._settled():
                return
            self.regular = len(self.ends)
            longest = None if self.steps else loaders.longest_of()
            if longest is not None and longest.batch is not None:
                loaders.longest_wanted = True
                return
        else:
            self.longest_operations = operations
            if loaders.given and len(self.ends) < self.regular + AFTER_LONGEST:
                return
            if not loaders.given and len(self.ends) < self.regular + 2:
                return
        self._follow_evaluation()

    def _follow_evaluation(self) -> None:
        if self.evaluation is None or self.loaders.drawn is None:
            self.finish(self)
        self.over = self.loaders.over = True
        self.loaders.again = self._goes_on
        self.tracker.recorder = None
        assert self.evaluation is not None
        self.evaluation.forced = self.evaluation.after = True
        self.seen_before = self.evaluation.calls
        self.followed()

    def _goes_on(self) -> None:
        """The program wants to train again: with what its loader had drawn ahead, or anew."""
        self.rest += 1
        assert self.evaluation is not None
        if self.evaluation.calls > self.seen_before or self.rest > REST:
            with disable_current_modes():
                self.finish(self)

    def _settled(self) -> bool:
        """Whether the last step reserved nothing new, or enough steps were taken."""
        count = len(self.ends)
        if self.steps:
            return count >= self.steps
        if count < LEAST:
            return False
        if count >= MAX_STEPS:
            return True
        left = self.kept()[-3:-1]
        if all(left) or (count == LEAST and left[-1]):  # what steps leave behind may go on growing
            return False
        trace, ends = self.tracker.counted(self.ends)
        replay = Replay(WORKSPACE)
        reserved = [replay.run(trace, end).reserved for end in ends]
        return reserved[-1] == reserved[-2]

    def kept(self) -> list[dict[int, int]]:
        """For each regular step {storage that it made and that is still alive: bytes}.

        Parameters, gradients and optimizer states are left out, and so is what is less than `FEW`.
        """
        trace, ends = self.tracker.counted(self.ends[: self.regular or None])
        kept: list[dict[int, int]] = []
        begin = 0
        alive: dict[int, int] = {}  # storage -> the step that made it
        for number, end in enumerate(ends):
            for kind, storage, category, _ in trace.events[begin:end]:
                if kind == BORN:
                    alive[storage] = number
                if kind == DIES or category in LASTING:
                    alive.pop(storage, None)
            begin = end
            kept.append({})
        for storage, number in alive.items():
            kept[number][storage] = trace.bytes[storage]
        return [made if sum(made.values()) >= FEW else {} for made in kept]


def _way(optimizer: torch.optim.Optimizer, places: Places) -> str:
    """How an optimizer of PyTorch's updates its parameters, by its arguments or its default."""
    group = optimizer.param_groups[0]
    if "foreach" not in group or not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    if group.get("fused"):
        return "fused"
    on_gpu = all(places.on_gpu(one) for group in optimizer.param_groups for one in group["params"])
    if group["foreach"] or (group["foreach"] is None and on_gpu):
        return "foreach"
    return "a tensor at a time"
