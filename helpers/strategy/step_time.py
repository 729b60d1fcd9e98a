"""How long a planned step takes: a simple model of GPUs and links, with every assumption stated.

Bytes and FLOPs come from the plan and are exact. The speeds in this module are not. The model is
meant to rank layouts and to say what limits each of them; measure a time that matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple, Protocol

from helpers.gpus import GPU, find
from helpers.parallel.comm_meter import SentMessage
from helpers.parallel.layout import Parallel
from helpers.recipe import Recipe
from helpers.timing.specs import ARITHMETICS, SPECS
from helpers.values import one_of


class Link(NamedTuple):
    """Between two devices: `speed` in bytes per second each way, `latency` in s per message."""

    name: str
    speed: float
    latency: float


# Sustained speeds, rounded: from memory of the manufacturers' figures (NVIDIA's pages on NVLink and
# InfiniBand, the PCI Express and Ethernet standards) and of common benchmarks. This course has
# measured none of them. The latencies give the order of magnitude of one NCCL message.
LINKS = {
    link.name: link
    for link in (
        Link("NVLink 4", 450e9, 3e-6),
        Link("NVLink 3", 300e9, 3e-6),
        Link("PCIe 4 x16", 24e9, 10e-6),
        Link("PCIe 3 x16", 12e9, 10e-6),
        Link("InfiniBand 400 Gbit", 45e9, 5e-6),
        Link("Ethernet 100 Gbit", 11e9, 30e-6),
        Link("Ethernet 10 Gbit", 1.1e9, 50e-6),
        Link("Ethernet 1 Gbit", 0.11e9, 100e-6),
    )
}

# FLOPs per second by arithmetic, {GPU: {arithmetic: peak}}: those of the data sheets that
# timing/specs.py names; 0 where the GPU has no such arithmetic.
PEAKS = {
    name: {arithmetic: getattr(specs, arithmetic) for arithmetic in ARITHMETICS}
    for name, specs in SPECS.items()
}
# The fraction of the peak that a training step of a transformer reaches: an assumption. 0.3 to 0.5
# is usual (Chowdhery et al. 2022, PaLM, table 3, report 0.21 to 0.46 of four language models).
UTILIZATION = 0.4

# How many messages follow one another when a collective runs over a ring of n ranks (Patarasuk and
# Yuan 2009). Each of them pays the latency once.
_MESSAGES_IN_A_ROW = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "send": lambda n: 1,
}
AXES = ("data", "tensor", "pipeline")


class TimedRank(Protocol):
    """What the model needs of a rank's plan."""

    @property
    def flops(self) -> Mapping[str, int]: ...

    @property
    def sent(self) -> Sequence[SentMessage]: ...


class TimedPlan(Protocol):
    """What the model needs of a layout's plan: `plan_ranks.ParallelPlan`, kept or just made."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def parallel(self) -> Parallel: ...

    @property
    def ranks(self) -> Sequence[TimedRank]: ...


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    compute  forward, backward and what is recomputed
    bubble   the time that a pipeline's stages wait for one another
    exposed  {axis: communication that computation waits for}
    hidden   {axis: communication that runs at the same time as computation}
    """

    compute: float
    bubble: float
    exposed: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of the whole step; hidden communication adds nothing."""
        return self.compute + self.bubble + sum(self.exposed.values())

    @property
    def limit(self) -> str:
        """What takes most of the step: "compute", "bubble", or an axis for its communication."""
        parts = {"compute": self.compute, "bubble": self.bubble, **self.exposed}
        return max(parts, key=lambda part: parts[part])

    def __str__(self) -> str:
        bubble = f" + {self.bubble * 1e3:.1f} ms of bubble" if self.bubble else ""
        waits = "".join(
            f" + {seconds * 1e3:.1f} ms for {axis} messages"
            for axis, seconds in self.exposed.items()
        )
        return f"{self.total * 1e3:.1f} ms: {self.compute * 1e3:.1f} ms of work{bubble}{waits}"


def rate(gpu: GPU | str, precision: str) -> float:
    """FLOPs per second that a training step is assumed to reach: `UTILIZATION` of the GPU's peak.

    Raises ValueError for an unknown GPU, one without a known peak, and one without the precision.
    """
    name = gpu if isinstance(gpu, str) else gpu.name
    if name not in PEAKS:
        if isinstance(gpu, str):
            find(gpu)  # raises with the names there are
        raise ValueError(f"No peak is known for gpu={name!r}: use one of {', '.join(PEAKS)}.")
    if not PEAKS[name][precision]:
        known = ", ".join(kind for kind, peak in PEAKS[name].items() if peak)
        raise ValueError(f"The {name} has no {precision} arithmetic: use {known}.")
    return PEAKS[name][precision] * UTILIZATION


def find_link(links: Link | str | Mapping[str, Link | str], axis: str) -> Link:
    """The link of an axis. `links` is one for all, by itself or by its name, or one for each axis.

    Raises ValueError for an unknown name and for an axis without a link.
    """
    if isinstance(links, Mapping):
        if axis not in links:
            raise ValueError(f"No link is given for the {axis} ranks: add {axis!r} to links.")
        links = links[axis]
    if isinstance(links, str):
        one_of("link", links, LINKS)
        return LINKS[links]
    return links


def transfer(sent: SentMessage, link: Link) -> float:
    """Seconds of one collective over a ring of such links, or of one message."""
    return sent.bytes / link.speed + _MESSAGES_IN_A_ROW[sent.kind](sent.ranks) * link.latency


def step(plan: TimedPlan, gpu: GPU | str, links: Link | str | Mapping[str, Link | str]) -> StepTime:
    """The time of one optimizer step of a planned layout.

    links  one for all axes, or one for each: {"data": ..., "tensor": ..., "pipeline": ...}
    What is assumed to run at the same time as computation is said by `shown_of_data` and
    `shown_of_pipeline`. Tensor-parallel messages and those of the optimizer phase (ZeRO-1's
    broadcasts, the gradient norm) are waited for.
    Raises ValueError for an unknown GPU or link, a missing axis, and a precision the GPU lacks.
    """
    compute, seconds_in = _compute(plan, gpu)
    stages = plan.parallel.pipeline
    bubble = compute * (stages - 1) / plan.recipe.accumulation if stages > 1 else 0.0
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for axis in AXES:
        messages = _busiest(plan.ranks, axis)
        if not messages:
            continue
        link = find_link(links, axis)
        during: list[Timed] = []  # forward and backward passes
        after: list[Timed] = []  # the optimizer's phase
        for message in messages:
            timed = Timed(message.phase, transfer(message, link))
            (after if message.phase == "optimizer" else during).append(timed)
        total = _sum(during)
        if not during or axis == "tensor":
            shown = total
        elif axis == "pipeline":
            shown = shown_of_pipeline(during, stages, compute)
        else:
            shown = shown_of_data(during, plan.parallel, plan.recipe, seconds_in)
        exposed[axis], hidden[axis] = shown + _sum(after), total - shown
    return StepTime(compute, bubble, exposed, hidden)


class Timed(NamedTuple):
    """A message's phase and how many seconds it takes."""

    phase: str
    seconds: float


def _sum(messages: Sequence[Timed]) -> float:
    return fsum(message.seconds for message in messages)


def _compute(plan: TimedPlan, gpu: GPU | str) -> tuple[float, dict[str, float]]:
    """(seconds of computation of the slowest rank, {phase: seconds} of the same rank)."""
    speed = rate(gpu, plan.recipe.precision)
    slowest = max(plan.ranks, key=lambda rank: sum(rank.flops.values()))
    compute = sum(slowest.flops.values()) / speed
    return compute, {phase: flops / speed for phase, flops in slowest.flops.items()}


def _busiest(ranks: Sequence[TimedRank], axis: str) -> list[SentMessage]:
    """The messages along an axis of the rank that sends most bytes there."""
    along = [[message for message in rank.sent if message.axis == axis] for rank in ranks]
    return max(along, key=lambda messages: sum(message.bytes for message in messages))


def shown_of_pipeline(messages: Sequence[Timed], stages: int, compute: float) -> float:
    """Seconds of a pipeline's messages that computation waits for.

    Messages run beside computation, except for those that fill and drain the pipeline (one over
    each boundary between stages, forward and backward) and for what takes longer than the
    computation.
    """
    total = _sum(messages)
    fill_and_drain = 2 * (stages - 1) * max(message.seconds for message in messages)
    return min(total, max(fill_and_drain, total - compute))


def shown_of_data(
    messages: Sequence[Timed], parallel: Parallel, recipe: Recipe, seconds_in: Mapping[str, float]
) -> float:
    """Seconds of the data ranks' messages that computation waits for.

    messages    in the order in which the last micro-batch sends them
    seconds_in  {phase: seconds of computation}
    """
    if parallel.zero_stage >= 2:
        return _shown_of_fsdp(messages, seconds_in)
    # DDP (Li et al. 2020, PyTorch Distributed): the buckets of the last backward pass are reduced
    # while it goes on, all but the last bucket. Where a pipeline or tensor ranks are in use, `Rank`
    # reduces in the optimizer's phase instead, and these messages are not among those here.
    last_pass = seconds_in["backward"] / recipe.accumulation
    return max(messages[-1].seconds, _sum(messages) - last_pass)


def _shown_of_fsdp(messages: Sequence[Timed], seconds_in: Mapping[str, float]) -> float:
    """FSDP gathers the next layer while the current one computes (Zhao et al. 2023).

    What is waited for is the first gathering of the forward passes, the last message of the
    backward passes, and whatever takes longer than the passes themselves.
    """
    forward, backward = (
        [message for message in messages if message.phase == phase]
        for phase in ("forward", "backward")
    )
    return max(forward[0].seconds, _sum(forward) - seconds_in["forward"]) + max(
        backward[-1].seconds, _sum(backward) - seconds_in["backward"]
    )
