"""The planner: what a training step needs, before it runs.

`plan(recipe)` runs the real training step on tensors that have shapes but no values (`FakeTensorMode`) and follows
every storage. It needs no GPU, no weights and no data, and gives the same answer on every machine.

Target "cuda" plans for a GPU: sizes are rounded up to the 512 bytes that PyTorch's CUDA allocator hands out, and the
operations that differ there (dropout, autocast's list of fp32 operations) are replaced by the GPU's own. Target "cpu"
plans what the same step takes here, and is compared with real tensors to the byte in the tests.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import models
from helpers.allocator import UNIT, Ledger, Occupied, replay
from helpers.cards import CONTEXT, MALLOC, MARGIN, WORKSPACE, Card, cublas_workspace, find
from helpers.on_cuda import OnCuda
from helpers.recipe import Recipe
from helpers.optimizers import make_optimizer, states
from helpers.step import Batch, train_step
from helpers.tracker import (BORN, CATEGORIES, DIES, MOVES, ACTIVATIONS, OPTIMIZER, PARAMETERS, PHASES, Story, Tracker,
                             steady_memory)
from helpers.units import GIB
from helpers.valueless import Stepping, Valueless

BLOCK = {"cuda": UNIT, "cpu": 1}  # bytes that sizes are rounded up to


@dataclass(frozen=True)
class Plan:
    """One optimizer step, planned.

    timeline   int64 [moments, 5], bytes alive after each event, columns in the order of `CATEGORIES`; of the micro-batches
               the first two, since the others repeat the second
    phases     int8 [moments], index into `PHASES`
    flops      {"forward", "recompute", "backward"}: operations an optimizer step (a multiply-add counts as two)
    parameters number of parameters, trained or not
    makers     (bytes, category, operation) of everything alive at the peak, largest first
    ledger     births and deaths of the same moments by storage, for `occupied`
    """
    recipe: Recipe
    target: str
    timeline: np.ndarray
    phases: np.ndarray
    flops: dict[str, int]
    parameters: int
    makers: list[tuple[int, str, str]]
    ledger: Ledger

    @cached_property
    def moment(self) -> int:
        """Index of the peak in the timeline."""
        return int(self.timeline.sum(axis=1).argmax())

    @property
    def peak(self) -> int:
        """Bytes of tensors at the peak. What `torch.cuda.max_memory_allocated` says is a little more: see `occupied`."""
        return int(self.timeline[self.moment].sum())

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak by category."""
        return dict(zip(CATEGORIES, map(int, self.timeline[self.moment])))

    @property
    def highest(self) -> dict[str, int]:
        """The most bytes each category reaches, each at its own moment."""
        return dict(zip(CATEGORIES, map(int, self.timeline.max(axis=0))))

    @property
    def peak_phase(self) -> str:
        return PHASES[self.phases[self.moment]]

    def occupied(self, card: str | Card, capacity: int | None = None) -> Occupied:
        """What PyTorch's caching allocator makes of the step on a card: the allocated and the reserved peak, in bytes.

        capacity  bytes it may reserve, None for as much as it likes
        Raises ValueError for an unknown card or a plan for a CPU, allocator.OutOfMemory where the capacity does not suffice.
        """
        if self.target != "cuda":
            raise ValueError("A CPU has no caching allocator: plan for target=\"cuda\".")
        return replay(self.ledger, cublas_workspace(find(card) if isinstance(card, str) else card) // 2, capacity)

    @property
    def overhead(self) -> int:
        """Bytes that the allocator must have beside the tensors for the step to run: unused ends of blocks, and free blocks
        too small for what comes. Simulated for CUDA (`allocator.Ledger.least`), a stated share on a CPU."""
        return self.ledger.least - self.peak - 2 * WORKSPACE if self.target == "cuda" else int(self.peak * MALLOC)

    def fits(self, card: str | Card, allocator: bool = True) -> "Fit":
        """Whether the step fits a card, with every term that decides it. Raises ValueError for an unknown card.

        allocator  False leaves its part out: a bound from below, for which nothing is simulated
        """
        card = find(card) if isinstance(card, str) else card
        return Fit(card, {"tensors at the peak": self.peak, "cuBLAS workspace": cublas_workspace(card),
                          "allocator": self.overhead if allocator else 0, "margin": int(MARGIN * self.peak), "CUDA context": CONTEXT})

    def at(self, batch_size: int | None = None, length: int | None = None) -> "Plan":
        """The plan for another batch size or length, in a few milliseconds once `surface` has been made."""
        changed = replace(self.recipe, **{name: value for name, value in (("batch_size", batch_size),
                                                                          ("length", length)) if value})
        from helpers.surface import surface  # a surface is made of plans
        return surface(changed, self.target).plan(changed)

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {size / GIB:.2f}" for name, size in self.at_peak.items())
        return f"{self.peak / GIB:.2f} GiB at the peak ({self.peak_phase}): {parts}"


@dataclass(frozen=True)
class Fit:
    """Does it fit? `terms` are bytes, each named; `need` is their sum. True where the card holds it."""
    card: Card
    terms: dict[str, int]

    @property
    def need(self) -> int:
        return sum(self.terms.values())

    @property
    def over(self) -> int:
        """Bytes over the card, negative where there is room."""
        return self.need - self.card.memory

    def __bool__(self) -> bool:
        return self.over <= 0

    def __str__(self) -> str:
        room = f"{abs(self.over) / GIB:.1f} GiB " + ("too much" if self.over > 0 else "to spare")
        return f"needs {self.need / GIB:.1f} GiB, the {self.card.name} has {self.card.memory / GIB:.1f} GiB: {room}"


def plan(recipe: Recipe, target: str = "cuda", change: Callable[[torch.nn.Module], object] | None = None,
         parallel=None) -> Plan:
    """Plan one optimizer step of `recipe` on "cuda" or "cpu". Raises ValueError for another target.

    change    what else to do to the model (in place) before its optimizer is made, such as freezing by other names;
              inside it, the model's tensors have no values
    parallel  a `helpers.parallel.Parallel`: the step laid over ranks, as a `helpers.parallel.planned.ParallelPlan`
    """
    if parallel is not None:
        if change is not None:
            raise ValueError("change and parallel cannot be planned together: leave one out.")
        from helpers.parallel.planned import plan_parallel  # which is made of plans
        return plan_parallel(recipe, parallel, target)
    if change is not None:
        return tell(trace(recipe, target, change), recipe, target)
    return replace(_plan(_shape(recipe), target), recipe=recipe)


@lru_cache(maxsize=256)
def _plan(recipe: Recipe, target: str) -> Plan:
    return tell(trace(recipe, target), recipe, target)


def _shape(recipe: Recipe) -> Recipe:
    """The recipe with everything at its default that changes no size: equal shapes share a plan."""
    plain = Recipe()
    return replace(recipe, seed=plain.seed, steps=plain.steps, learning_rate=None, warmup=plain.warmup, train_size=None,
                   test_size=plain.test_size,
                   weight_decay=plain.weight_decay, max_grad_norm=plain.max_grad_norm, weights=plain.weights,
                   padding=plain.padding)


def trace(recipe: Recipe, target: str, change: Callable[[torch.nn.Module], object] | None = None,
          empty: Callable[..., torch.nn.Module] = models.empty,
          make_batch: Callable[[torch.nn.Module, Recipe], Batch] | None = None) -> tuple[Story, int]:
    """(story of one step on fake tensors with its optimizer states in place, number of parameters).

    From the third micro-batch on nothing new happens, so at most two are traced.

    empty, make_batch  for a model that is not the course's: `empty(recipe, recompute=...)` makes it, as `models.empty`
                       does, and `make_batch(model, recipe)` a micro-batch of it, as `fake_batch` does
    """
    check_target(target)
    def kernels():
        return OnCuda(recipe, active=target == "cuda")

    with FakeTensorMode(allow_non_fake_inputs=True), Valueless(), kernels():
        model = empty(recipe, recompute=kernels)
        if change is not None:
            change(model)
        optimizer, scaler = make_optimizer(model, recipe), Stepping("cpu", enabled=recipe.precision == "fp16")
        for parameter in model.parameters():  # a first update, so that the optimizer has its states
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(torch.zeros(()))  # it makes its tensors when first used
        story = follow(model, optimizer, lambda: (make_batch or fake_batch)(model, recipe), recipe, scaler)
    return story, sum(parameter.numel() for parameter in model.parameters())


def check_target(target: str) -> None:
    """Raises ValueError for a target that is not planned."""
    if target not in BLOCK:
        raise ValueError(f"target={target!r} is not known: use cuda or cpu.")


def follow(model, optimizer, make_batch, recipe: Recipe, scaler: torch.amp.GradScaler | None = None) -> Story:
    """Run one optimizer step under the tracker, on fake or on real tensors. `make_batch()` gives a micro-batch;
    optimizer and scaler must have taken a step before, so that their states exist."""
    count = min(recipe.accumulation, 2)
    tracker = Tracker()

    def batches():
        for _ in range(count):
            with tracker.looking_away():
                batch = make_batch()
            tracker.phase("forward")
            tracker.adopt(batch, ACTIVATIONS)
            yield batch
            del batch

    with steady_memory(), tracker:
        tracker.adopt([list(model.parameters()), list(model.buffers())], PARAMETERS)
        tracker.adopt(states(optimizer, scaler), OPTIMIZER)
        tracker.story.begin = len(tracker.story.events)
        tracker.watch_gradients(model)
        train_step(model, optimizer, batches(), recipe.micro_batch * count, recipe, tracker.phase, scaler)
    for name in tracker.story.flops:
        tracker.story.flops[name] = tracker.story.flops[name] * recipe.accumulation // count
    return tracker.story


def tell(traced: tuple[Story, int], recipe: Recipe, target: str, sizes: np.ndarray | None = None) -> Plan:
    """A story as a plan; `sizes` (bytes a storage) replace those that were seen."""
    story, parameters = traced
    asked = np.array(story.bytes) if sizes is None else sizes
    sizes = -(-asked // BLOCK[target]) * BLOCK[target]
    changes = np.zeros((len(story.events), len(CATEGORIES)), dtype=np.int64)
    phases = np.zeros(len(story.events), dtype=np.int8)
    where: dict[int, int] = {}
    for moment, (kind, storage, category, phase) in enumerate(story.events):
        phases[moment] = phase
        if kind == BORN:
            changes[moment, category] = sizes[storage]
        elif kind == DIES:
            changes[moment, category] = -sizes[storage]
        elif kind == MOVES:
            changes[moment, where[storage]] -= sizes[storage]
            changes[moment, category] += sizes[storage]
        if kind in (BORN, MOVES):
            where[storage] = category
    first = story.begin - 1  # the moment at which everything that was there before is counted
    timeline = changes.cumsum(axis=0)[first:]
    moment = int(timeline.sum(axis=1).argmax())
    alive: dict[int, int] = {}
    for kind, storage, category, _ in story.events[:first + moment + 1]:
        if kind in (BORN, MOVES):
            alive[storage] = category
        elif kind == DIES:
            del alive[storage]
    makers = sorted(((int(sizes[s]), CATEGORIES[c], story.made_by[s]) for s, c in alive.items()), reverse=True)
    return Plan(recipe, target, timeline, phases[first:], dict(story.flops), parameters, makers, _ledger(story, asked))


def _ledger(story: Story, sizes: np.ndarray) -> Ledger:
    """What an allocator is asked for in the course of a story."""
    before, events = story.events[:story.begin], story.events[story.begin:]
    moves = [(storage + 1 if kind == BORN else -storage - 1, phase) for kind, storage, _, phase in events if kind != MOVES]
    signed, phases = np.array(moves, dtype=np.int32).reshape(-1, 2).T
    given, states = ([storage for _, storage, category, _ in before if (category == OPTIMIZER) == late] for late in (False, True))
    return Ledger(sizes, np.array(given, np.int32), np.array(states, np.int32), signed, phases.astype(np.int8))


def fake_batch(model, recipe: Recipe) -> Batch:
    """One micro-batch without values, as `data.Encoded.batch` makes it; inside FakeTensorMode."""
    rows = recipe.micro_batch
    labels = torch.zeros(rows, dtype=torch.long)
    if recipe.task == "text":
        ids = torch.zeros(rows, recipe.tokens, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    shape = model.config
    return {"pixel_values": torch.zeros(rows, shape.num_channels, shape.image_size, shape.image_size), "labels": labels}


if __name__ == "__main__":
    from helpers.command import main  # it imports this module by its own name: what runs is that copy
    raise SystemExit(main())
