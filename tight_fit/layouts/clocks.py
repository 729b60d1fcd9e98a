"""The clocks of a rank: when its CPU, its GPU and its links have done the operations of a step.

What is between two messages is summed up once for a GPU (`Stretch`), so that the same step can be
played over other links in no time. The rules are those of PyTorch's engines:

- DDP reduces a bucket of gradients once it is complete, and the optimizer waits for all buckets.
- With HSDP a gradient is summed over the replicas once it is summed within one.
- FSDP2 gathers a layer as soon as the layer before it has been taken over, ahead of the
  computation, which waits for it. It scatters gradients once they are complete, and the optimizer
  waits for that.
- The groups of a layer's experts are gathered and scattered as those of the layers, one after the
  other with them: FSDP2 has one stream for both.
- Keys, values and their gradients travel around the ring of context ranks beside the attention to
  what has arrived, and are waited for where PyTorch waits for them.
- Tensor-parallel messages, tokens on their way to experts and back, and all that the optimizer's
  phase sends, are waited for at once.
- While a message is under way, kernels take `SLOWER` times as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tight_fit.gpus.specs import GpuSpecs
from tight_fit.kernels.kernel_time import launch_seconds
from tight_fit.kernels.op import OPTIMIZER, PHASES, Op
from tight_fit.kernels.step_seconds import issuing, operation_times
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.schedules import Action, Schedule, consumer, needs

# Computation beside communication is 18.9 % slower in the mean, on A100s, H100s and two GPUs of AMD
# (Lee et al. 2025, arXiv 2507.03114).
SLOWER = 1.189
BESIDE = ("data", "replicate", "expert_data")  # axes whose messages run beside the computation
RING = "context"  # the axis whose messages are waited for one by one
WAIT = "wait_tensor"
COPY_OUT = "split_with_sizes_copy"  # by which FSDP2 takes over a layer that was gathered

Transfer = Callable[[SentMessage], float]  # seconds of a message


class Stretch(NamedTuple):
    """Operations without a message between them, in seconds.

    cpu  until the CPU has issued all of them
    gpu  of their kernels
    lag  how much later than the CPU's begin the GPU would have to begin, to go through without
         waiting for a launch
    """

    cpu: float
    gpu: float
    lag: float


class Event(NamedTuple):
    """What happens next to a rank.

    kind  "work" (a `Stretch`), "value" (the CPU waits for the GPU), "message", "arrived" (the GPU
          waits for the ring's next message), "taken over" (of a layer that was gathered), "pass"
          (an action of a pipeline's schedule begins) or "update" (the optimizer's phase begins)
    """

    kind: str
    stretch: Stretch | None = None
    message: SentMessage | None = None


def events_of(traced: TracedOps, gpu: GpuSpecs) -> list[Event]:
    """The events of a rank's step on a GPU, in the order in which its CPU issues them.

    Raises ValueError as `step_seconds.operation_times` does.
    """
    times = operation_times(traced, gpu)
    issue = launch_seconds(gpu)["kernel"]
    which, phase = np.array(traced.order, dtype=np.int64).reshape(-1, 2).T
    issued = issuing(times, which, phase, gpu)
    begin, end, again = traced.again
    stops = {index: stop for index, ops in enumerate(traced.ops) if (stop := _stop(ops))}
    if not any(stop.message and stop.message.axis == RING for stop in stops.values()):
        stops = {index: stop for index, stop in stops.items() if stop.kind != "arrived"}
    stops |= {int(index): Event("value") for index in np.flatnonzero(times.waits)}
    updates = int(np.argmax(phase == OPTIMIZER)) if (phase == OPTIMIZER).any() else len(which)
    named = dict.fromkeys(traced.passes, Event("pass")) | {updates: Event("update")}
    after_stops = (np.flatnonzero(np.isin(which, list(stops))) + 1).tolist()
    cuts = sorted({0, len(which), begin, end, *named, *after_stops})

    def between(first: int, last: int) -> list[Event]:
        events = [named[first]] if first in named else []
        on_cpu, on_gpu = issued[first:last].copy(), times.on_gpu[which[first:last]]
        stop = stops.get(int(which[last - 1])) if last > first else None
        if stop and stop.message:
            on_cpu[-1] = issue
            now = PHASES[phase[last - 1]]
            stop = stop._replace(message=_in_phase(stop.message, now))
        if last > first:
            events.append(Event("work", _stretch(on_cpu, on_gpu)))
        return [*events, stop] if stop else events

    events: list[Event] = []
    repeated: list[Event] = []
    for first, last in zip(cuts, cuts[1:]):
        made = between(first, last)
        events += made
        if again and begin <= first < end:
            repeated += made
            if last == end:
                events += repeated * again
    return events


def _stop(ops: tuple[Op, ...]) -> Event | None:
    """What an operation ends a stretch with, if it does."""
    for op in ops:
        if op.kind == "message" and op.shape:
            return Event("message", None, SentMessage(op.name, op.read, op.shape[0], op.layout, ""))
        if op.kind == "message" and op.name == WAIT:
            return Event("arrived")
        if op.name == COPY_OUT:
            return Event("taken over")
    return None


def _in_phase(message: SentMessage, phase: str) -> SentMessage:
    return SentMessage(message.kind, message.payload, message.ranks, message.axis, phase)


def _stretch(on_cpu: np.ndarray, on_gpu: np.ndarray) -> Stretch:
    issued, work = np.cumsum(on_cpu), np.cumsum(on_gpu)
    lag = (issued - np.concatenate([[0.0], work[:-1]])).max()
    return Stretch(float(issued[-1]), float(work[-1]), float(lag))


class Clocks:
    """A rank at work: `cpu` and `gpu` are the seconds at which each is free again.

    transfer  gives the seconds of a message
    sent      {axis: seconds of all messages so far}
    """

    def __init__(self, transfer: Transfer):
        self.transfer = transfer
        self.cpu = self.gpu = 0.0
        self.sent: dict[str, float] = {}
        self._links: dict[str, float] = {}  # when the link of an axis is free again
        self._gathered: deque[float] = deque()  # when each layer that is not taken over is here
        self._taken_over = 0.0
        self._passed_on: deque[float] = deque()  # when each message of the ring is here
        self._updating = False

    def play(self, events: Iterable[Event]) -> float:
        """Go through events, and return when the GPU has done them."""
        for kind, stretch, message in events:
            if stretch is not None:
                self._work(stretch)
            elif message is not None:
                self._send(message)
            elif kind == "value":
                self.cpu = max(self.cpu, self.gpu)
            elif kind == "arrived" and self._passed_on:
                self.gpu = max(self.gpu, self._passed_on.popleft())
            elif kind == "taken over" and self._gathered:
                self.gpu = self._taken_over = max(self.gpu, self._gathered.popleft())
            elif kind == "update":
                self.gpu = max([self.gpu, *self._links.values()])
                self._updating = True
        return self.gpu

    def exchange(self, message: SentMessage) -> None:
        """A message that the computation waits for."""
        begin = max(self.cpu, self.gpu, self._links.get(message.axis, 0.0))
        self.gpu = self._links[message.axis] = begin + self.spend(message)

    def _work(self, stretch: Stretch) -> None:
        begin = max(self.gpu, self.cpu + stretch.lag)
        self.cpu += stretch.cpu
        beside = max([0.0, *self._links.values()]) - begin  # seconds of messages under way
        if beside <= 0:
            self.gpu = begin + stretch.gpu
        elif stretch.gpu * SLOWER <= beside:
            self.gpu = begin + stretch.gpu * SLOWER
        else:
            self.gpu = begin + stretch.gpu + beside * (1 - 1 / SLOWER)

    def _send(self, message: SentMessage) -> None:
        link = "data" if message.axis == "expert_data" else message.axis
        free = max(self.cpu, self._links.get(link, 0.0))
        if message.axis == "replicate":  # of what the data ranks of a replica have summed
            free = max(free, self._links.get("data", 0.0))
        if message.axis == RING:
            self._links[link] = max(free, self.gpu) + self.spend(message)
            self._passed_on.append(self._links[link])
        elif self._updating or message.axis not in BESIDE:
            self.exchange(message)
        elif message.kind == "all_gather":
            end = max(free, self._taken_over) + self.spend(message)
            self._links[link] = end
            self._gathered.append(end)
        else:
            self._links[link] = max(free, self.gpu) + self.spend(message)

    def spend(self, message: SentMessage) -> float:
        """The seconds of a message, which `sent` adds up."""
        seconds = self.transfer(message)
        self.sent[message.axis] = self.sent.get(message.axis, 0.0) + seconds
        return seconds


def play(
    ranks: Sequence[Sequence[Event]], transfer: Transfer, schedule: Schedule | None = None
) -> list[Clocks]:
    """Play the steps of a layout's ranks, one for each rank of the pipeline, and return their
    clocks at the end.

    schedule  of the pipeline; None without one, where there is one rank
    """
    clocks = [Clocks(transfer) for _ in ranks]
    if schedule is None:
        clocks[0].play(ranks[0])
        return clocks
    actions, updates = zip(*map(_passes, ranks))
    orders = [_that_work(own) for own in schedule.actions]
    arrivals: dict[Action, float] = {}  # when what an action of another rank has given is there
    done = [0] * len(ranks)
    while any(done[rank] < len(own) for rank, own in enumerate(orders)):
        before = list(done)
        for rank, own in enumerate(orders):
            while done[rank] < len(own):
                action = own[done[rank]]
                waits = [
                    needed
                    for needed in needs(action, schedule.stages)
                    if schedule.rank_of(needed.stage) != rank
                ]
                if any(needed not in arrivals for needed in waits):
                    break
                clock = clocks[rank]
                clock.gpu = max([clock.gpu, *(arrivals[needed] for needed in waits)])
                hands_on = consumer(action, schedule.stages) is not None
                events = actions[rank][done[rank]]
                arrivals[action] = _do(clock, events, action.kind, hands_on)
                done[rank] += 1
        assert done != before, "the stages of a pipeline wait for each other for ever"
    return _update(clocks, updates)


def _that_work(actions: Sequence[Action]) -> list[Action]:
    """Without those that torch leaves out: the first stage has no input whose gradient is due, and
    does all of its backward pass where that of the weights is due."""
    return [action for action in actions if action.kind != "I" or action.stage]


def _passes(events: Sequence[Event]) -> tuple[list[list[Event]], list[Event]]:
    """(the events of each action of a rank, those of its update). What is before the first action,
    such as the weights that FSDP2 gathers for it, belongs to it."""
    actions: list[list[Event]] = [[]]
    begun = False
    for number, event in enumerate(events):
        if event.kind == "update":
            return actions, list(events[number:])
        if event.kind == "pass" and begun:
            actions.append([])
        begun = begun or event.kind == "pass"
        actions[-1].append(event)
    return actions, []


def _do(clock: Clocks, events: Sequence[Event], kind: str, hands_on: bool) -> float:
    """Do an action, and return when the neighbour has its result.

    A forward pass hands on all that it sends, a backward pass one message, the gradient of its
    input. What the last backward pass sends after that are the gradients that all stages share.
    """
    arrival = 0.0
    handed_on = 0
    for event in events:
        message = event.message
        if message is None or message.axis != "pipeline":
            clock.play([event])
        elif hands_on and (kind == "F" or not handed_on):
            handed_on += 1
            arrival = max(arrival, clock.cpu, clock.gpu) + clock.spend(message)
        else:
            clock.exchange(message)
    return arrival


def _update(clocks: Sequence[Clocks], updates: Sequence[Sequence[Event]]) -> list[Clocks]:
    """The optimizer's phase: from the norm of all gradients on, no stage is ahead of another."""
    norms = [_first_over_stages(events) for events in updates]
    for clock, events, norm in zip(clocks, updates, norms):
        clock.play(events[:norm])
    slowest = max(clock.gpu for clock in clocks)
    for clock, events, norm in zip(clocks, updates, norms):
        clock.gpu = slowest
        clock.play(events[norm:])
    return list(clocks)


def _first_over_stages(events: Sequence[Event]) -> int:
    """The place of the first message between stages, or the number of events."""
    for place, event in enumerate(events):
        if event.message is not None and event.message.axis == "pipeline":
            return place
    return len(events)
