"""What the callbacks of both Trainers have in common: what they say, and a step on copies."""

from __future__ import annotations

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tight_fit.gpus import GPU, as_gpu, here
from tight_fit.plans.own_step import CustomStepPlan, plan_custom_step
from tight_fit.script.loaders import find_longest, shape_of
from tight_fit.torch_private import OUT_OF_MEMORY_OBSERVER
from tight_fit.trace.quantized import copy_4_bits, in_4_bits
from tight_fit.units import size, span

MICRO_BATCHES = 2  # that are traced: all others repeat the second
REMEDIES = 3  # times that the batch is halved
Make = Callable[[], "CopiedStep"]
Advise = Callable[["CopiedStep", GPU], str]  # changes with which a step fits


class Teller:
    """Plans a step before training, and says so; compares the plan with the GPU afterwards."""

    def __init__(self, gpu: str | GPU | None = None, say: Callable[[str], object] = print):
        self.gpu = None if gpu is None else as_gpu(gpu)
        self.say = say
        self.facts: dict[str, Any] = {}

    def begin(self, make: Make, advice: Advise) -> None:
        """Plan the step that `make` gives, and watch the GPU from here on."""
        try:
            self._plan(make, advice)
        except NotImplementedError as error:
            self._tell(f"this training is not planned: {error}")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            if OUT_OF_MEMORY_OBSERVER is not None:
                OUT_OF_MEMORY_OBSERVER(self._explain)

    def end(self) -> None:
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

    def _plan(self, make: Make, advice: Advise) -> None:
        gpu = self.gpu or here()
        if gpu.capability == (0, 0):
            raise NotImplementedError(
                f'there is no GPU here; {type(self).__name__}(gpu="T4") names one.'
            )
        step = make()
        planned = step.plan(gpu)
        fit, peaks = planned.fits(gpu), planned.allocator_peaks(gpu)
        self.facts |= {
            "gpu": gpu.name,
            "memory": gpu.memory,
            "batch": step.shape,
            "need": fit.need,
            "terms": fit.terms,
            "fits": bool(fit),
            "allocated": peaks.allocated,
            "reserved": peaks.reserved,
            "seconds": step.seconds(planned, gpu),
        }
        self._tell(self._verdict())
        if not fit:
            self._tell(advice(step, gpu))

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


class CopiedStep(ABC):
    """A training step on copies without values.

    model, optimizer  the real ones, which are left as they are
    batch             the longest batch that the data set can give
    accumulation      micro-batches of a step
    """

    def __init__(self, model: nn.Module, optimizer: Any, batch: Any, accumulation: int):
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.accumulation = accumulation
        self.shape = list(shape_of(batch) or ())

    @abstractmethod
    def of(self, model: Any, optimizer: Any, batch: Any, parts: int) -> Callable[[], object]:
        """The step of so many micro-batches, as a function."""

    def shared(self) -> list[Any]:
        """What a copy of the model shares with the model."""
        return []

    @abstractmethod
    def prepare(self, model: Any, checkpointing: bool) -> None:
        """Change the copy of the model before it is planned."""

    def plan(self, gpu: GPU, halvings: int = 0, checkpointing: bool = False, most=MICRO_BATCHES):
        """The plan with a batch that is halved so many times, and with checkpointing."""

        def setup():
            model, optimizer = self._twins(checkpointing)
            held: list[torch.Tensor] = []
            batch = _moved(self.batch, halvings, held)
            parts = min(self.accumulation << halvings, most)
            return [model, *held], self.of(model, optimizer, batch, parts)

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

    def _twins(self, checkpointing: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Copies of model and optimizer on a planned GPU; nothing of the real ones is changed."""
        memo: dict[int, Any] = {id(thing): thing for thing in self.shared()}
        for module in self.model.modules():
            for value in (*module._parameters.values(), *module._buffers.values()):
                if value is None or id(value) in memo:
                    continue
                if in_4_bits(value):
                    copy_4_bits(value, memo, _twin)
                else:
                    memo[id(value)] = _twin(value)
            for value in vars(module).values():
                if isinstance(value, torch.Tensor):
                    memo.setdefault(id(value), _twin(value))
        model: Any = copy.deepcopy(self.model, memo)
        for layer in model.modules():
            if getattr(getattr(layer, "weight", None), "module", None) is not None:
                layer.weight.module = layer
        self.prepare(model, checkpointing)
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


def check_weights(model: nn.Module) -> None:
    """Raises NotImplementedError for weights that are neither plain nor in 4 bits."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter and not in_4_bits(parameter):
            raise NotImplementedError(
                f"{name} is a {type(parameter).__name__}; `tight-fit script` plans the program."
            )


def longest_batch(loader: Any) -> Any:
    """The largest batch that a loader can give; random numbers are drawn as if none were."""
    with random_numbers_kept():
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
    return batch


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Inside, random numbers may be drawn; afterwards they go on as if none were."""
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


def _moved(value: Any, halvings: int, held: list[torch.Tensor]) -> Any:
    """A batch on the planned GPU, halved so many times; its tensors are put into `held`."""
    if isinstance(value, torch.Tensor):
        held.append(_halved(_twin(value), halvings))
        return held[-1]
    if isinstance(value, Mapping):
        return {name: _moved(each, halvings, held) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_moved(each, halvings, held) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _halved(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return tensor[: max(1, len(tensor) >> times)].clone() if times and tensor.dim() else tensor
