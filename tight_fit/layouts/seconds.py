"""How long the step of a layout takes: its ranks' traced operations, and the links between them.

Each rank's kernels are timed as `Plan.seconds` does for one GPU (docs/gpu-time.md). Its messages
take what their bytes take on a link, and a time to begin; what runs beside computation is decided
by their places in the step (`clocks`). The stages of a pipeline wait for each other as their
schedule says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from tight_fit.checks import of_type, one_of, real, shown
from tight_fit.gpus import GPU
from tight_fit.gpus.specs import find_gpu
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.layouts.clocks import Clocks, events_of, play
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.schedules import Schedule


@dataclass(frozen=True)
class Link:
    """Between two devices: `speed` in bytes per second each way, `latency` in s per message.

    Raises ValueError or TypeError for a speed that is not above 0, and a latency below 0.
    """

    name: str
    speed: float
    latency: float

    def __post_init__(self):
        of_type("name", self.name, str)
        real("speed", self.speed, above=0)
        real("latency", self.latency, at_least=0)


# Speeds that NCCL reaches in large messages, and its latencies in small ones. Of NVLink it reaches
# four fifths (its maintainer, github NVIDIA/nccl-tests, issue 212: 370 of 450 GB/s of NVLink 4; 178
# and 149: 200 to 208 GB/s on A100s), of InfiniBand nearly all (issue 119: up to 96 of 100 GB/s over
# four cards). The others are what is usual of their standards' rates, and not measured. Small
# all-reduces take 12 µs between 2 GPUs on NVLink and 18 between 8, 42 between 8 on PCIe (issues 44
# and NVIDIA/nccl 1530), 30 between two machines: from that come `BEGIN` and the latencies.
LINKS = {
    link.name: link
    for link in (
        Link("NVLink 4", 370e9, 2e-6),
        Link("NVLink 3", 230e9, 2e-6),
        Link("PCIe 4 x16", 24e9, 6e-6),
        Link("PCIe 3 x16", 12e9, 6e-6),
        Link("InfiniBand 400 Gbit", 48e9, 10e-6),
        Link("InfiniBand 200 Gbit", 24e9, 10e-6),
        Link("Ethernet 100 Gbit", 11e9, 30e-6),
        Link("Ethernet 10 Gbit", 1.1e9, 50e-6),
        Link("Ethernet 1 Gbit", 0.11e9, 100e-6),
    )
}
BEGIN = 8e-6  # seconds that NCCL's kernel takes to begin and to end

# How many messages follow one another in a collective of n ranks; each of them pays the latency
# once. A small all-reduce runs over a tree, up and down, the others over a ring (NCCL's choice;
# Patarasuk and Yuan 2009 for the ring). An all-to-all is a message to each of the other ranks.
_MESSAGES_IN_A_ROW = {
    "all_reduce": lambda n: 2 * ceil(log2(n)),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "send": lambda n: 1,
}
# The axes of all layouts, in the order in which waiting is told of them.
AXES = ("data", "expert_data", "replicate", "context", "tensor", "expert", "pipeline")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    compute  the work of the rank that has most of it, launches that its GPU waits for included
    bubble   the time that a pipeline's stages wait for one another
    exposed  {axis: how much longer the step takes because of its messages}
    hidden   {axis: seconds of its messages that cost no time, beside computation}
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
    if not isinstance(links, Link):
        raise TypeError(f"{axis}={shown(links)} must be a Link, or the name of one.")
    return links


def transfer(sent: SentMessage, link: Link) -> float:
    """Seconds of one collective over such links, or of one message."""
    in_a_row = _MESSAGES_IN_A_ROW[sent.kind](sent.ranks)
    return BEGIN + in_a_row * link.latency + sent.bytes / link.speed


def step(
    ranks: Sequence[TracedOps | None],
    gpu: GPU | str,
    links: Link | str | Mapping[str, Link | str],
    schedule: Schedule | None = None,
) -> StepTime:
    """The time of one optimizer step of a planned layout.

    ranks     the operations of the ranks of a pipeline, or of the one that stands for all
    links     one for all axes, or one for each: {"data": ..., "tensor": ..., "pipeline": ...}
    schedule  of the pipeline, if there is one
    Raises ValueError for an unknown GPU or link, a missing axis, an arithmetic that the GPU lacks,
    and a plan without traced operations (for a CPU).
    """
    specs = find_gpu(gpu)
    events = [events_of(_planned(traced), specs) for traced in ranks]
    axes = {event.message.axis for own in events for event in own if event.message}
    by_axis = {axis: find_link(links, axis) for axis in AXES if axis in axes}

    def played(free: set[str]) -> list[Clocks]:
        return play(
            events,
            lambda sent: 0.0 if sent.axis in free else transfer(sent, by_axis[sent.axis]),
            schedule,
        )

    def total(clocks: Sequence[Clocks]) -> float:
        return max(clock.gpu for clock in clocks)

    compute = max(Clocks(lambda sent: 0.0).play(own) for own in events)
    slowest = played(set())
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    free: set[str] = set()
    before = total(slowest)
    for axis in by_axis:  # the time that is left when the messages of one axis more take none
        free.add(axis)
        after = total(played(free))
        exposed[axis] = before - after
        sent = max(clock.sent.get(axis, 0.0) for clock in slowest)
        hidden[axis] = max(0.0, sent - exposed[axis])
        before = after
    return StepTime(compute, max(0.0, before - compute), exposed, hidden)


def _planned(traced: TracedOps | None) -> TracedOps:
    if traced is None:
        raise ValueError('This plan has no seconds: plan it for device="cuda".')
    return traced
