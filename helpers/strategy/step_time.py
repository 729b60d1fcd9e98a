"""How long a planned step takes: a model of cards and links, every assumption stated.

Bytes and FLOPs come from the plan and are exact; the rates here are not. What the model is for is to rank layouts and to
say what limits each; a time that matters is to be measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from helpers.gpus import GPU, find
from helpers.parallel.comm_meter import SentMessage


class Link(NamedTuple):
    """Between two devices: `speed` in bytes a second each way, `latency` in seconds a message."""

    name: str
    speed: float
    latency: float


# Sustained rates, rounded, from memory of the makers' figures and common benchmarks; not measured by this course.
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

# Peaks in TFLOP/s, dense, with fp32 accumulation: fp32, tf32, bf16, fp16. NVIDIA's data sheets, from memory; 0 where the
# card has no such arithmetic. GeForce cards halve their tensor cores when they accumulate in fp32.
_PEAKS = {
    "GTX 1650": (3.0, 0, 0, 6.0),
    "RTX 4060 Laptop": (11.6, 11.6, 23.2, 23.2),
    "RTX 3060": (12.7, 12.7, 25.5, 25.5),
    "T4": (8.1, 0, 0, 65),
    "P100": (9.3, 0, 0, 18.7),
    "V100-16GB": (15.7, 0, 0, 125),
    "V100-32GB": (15.7, 0, 0, 125),
    "L4": (30.3, 60, 121, 121),
    "RTX 3090": (35.6, 35.6, 71, 71),
    "RTX 4090": (82.6, 82.6, 165, 165),
    "A100-40GB": (19.5, 156, 312, 312),
    "A100-80GB": (19.5, 156, 312, 312),
    "H100": (67, 495, 989, 989),
    "H200": (67, 495, 989, 989),
}
PEAKS = {
    gpu: dict(zip(("fp32", "tf32", "bf16", "fp16"), (rate * 1e12 for rate in rates)))
    for gpu, rates in _PEAKS.items()
}
UTILIZATION = 0.4  # share of the peak that a training step of a transformer gets: an assumption, 0.3 to 0.5 is usual

STEPS = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "send": lambda n: 1,
}  # messages of a ring one after another


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. compute: forward, backward and what is recomputed; bubble: a pipeline's waiting; exposed and
    hidden: communication by axis of the layout, that computation waits for, or runs beside."""

    compute: float
    bubble: float
    exposed: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.compute + self.bubble + sum(self.exposed.values())

    @property
    def limit(self) -> str:
        """What takes most of the step: "compute", "bubble", or the axis whose communication does."""
        parts = {"compute": self.compute, "bubble": self.bubble, **self.exposed}
        return max(parts, key=parts.get)

    def __str__(self) -> str:
        waits = "".join(
            f" + {seconds * 1e3:.1f} ms for {axis} messages"
            for axis, seconds in self.exposed.items()
        )
        bubble = f" + {self.bubble * 1e3:.1f} ms of bubble" if self.bubble else ""
        return f"{self.total * 1e3:.1f} ms: {self.compute * 1e3:.1f} ms of work{bubble}{waits}"


def rate(gpu: GPU | str, precision: str) -> float:
    """FLOPs a second that a step is taken to get. Raises ValueError where the card lacks the precision or is not known."""
    name = gpu if isinstance(gpu, str) else gpu.name
    if name not in PEAKS:
        raise ValueError(
            f"No peak rate is known for card={find(name).name if isinstance(gpu, str) else name!r}: "
            f"use one of {', '.join(PEAKS)}."
        )
    if not PEAKS[name][precision]:
        raise ValueError(
            f"The {name} has no {precision} arithmetic: use "
            f"{', '.join(kind for kind, peak in PEAKS[name].items() if peak)}."
        )
    return PEAKS[name][precision] * UTILIZATION


def transfer(sent: SentMessage, link: Link) -> float:
    """Seconds of one collective over a ring of such links, or of one message."""
    return sent.bytes / link.speed + STEPS[sent.kind](sent.ranks) * link.latency


def step(plan, gpu: GPU | str, links: Link | str | Mapping[str, Link | str]) -> StepTime:
    """The time of a `planned.ParallelPlan`.

    links  one for all, or one for each axis: {"data": ..., "tensor": ..., "pipeline": ...}
    What is taken to overlap: DDP's all-reduce with the last backward pass, all but its last bucket (in a pipeline it comes
    after everything, and waits); FSDP's gathering in the forward passes with their computation, all but the first, and
    what it sends in the backward passes with theirs, all but the last; a pipeline's messages with computation, all but
    those that fill and drain it or outlast the work. Tensor-parallel messages, ZeRO-1's broadcasts and the gradient norm
    are waited for.
    Raises ValueError for an unknown card, link or missing axis.
    """
    layout, recipe = plan.parallel, plan.recipe
    works = [sum(rank.flops.values()) / rate(gpu, recipe.precision) for rank in plan.ranks]
    compute = max(works)
    bubble = compute * (layout.pipeline - 1) / recipe.accumulation if layout.pipeline > 1 else 0.0
    slowest = plan.ranks[works.index(compute)]
    room = {
        phase: compute * work / max(1, sum(slowest.flops.values()))
        for phase, work in slowest.flops.items()
    }
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for axis in ("data", "tensor", "pipeline"):
        messages = max(
            ([message for message in rank.sent if message.axis == axis] for rank in plan.ranks),
            key=lambda some: sum(message.bytes for message in some),
        )
        if not messages:
            continue
        link = _link(links, axis)
        times = {id(message): transfer(message, link) for message in messages}
        waits = [
            message for message in messages if message.phase == "optimizer" or axis == "tensor"
        ]
        rest = [
            message for message in messages if message.phase != "optimizer" and axis != "tensor"
        ]
        total = sum(times[id(message)] for message in rest)
        seen = sum(times[id(message)] for message in waits)
        if rest and axis == "pipeline":
            fill = 2 * (layout.pipeline - 1) * max(times[id(message)] for message in rest)
            shown = min(total, max(fill, total - compute))
        elif rest and layout.zero_stage >= 2:
            gathers, scatters = (
                [times[id(message)] for message in rest if message.phase == phase]
                for phase in ("forward", "backward")
            )
            shown = max(gathers[0], sum(gathers) - room["forward"]) + max(
                scatters[-1], sum(scatters) - room["backward"]
            )
        elif rest:
            shown = max(times[id(rest[-1])], total - room["backward"] / recipe.accumulation)
        else:
            shown = 0.0
        exposed[axis], hidden[axis] = seen + shown, total - shown
    return StepTime(compute, bubble, exposed, hidden)


def _link(links, axis: str) -> Link:
    if isinstance(links, Mapping):
        if axis not in links:
            raise ValueError(f"No link is given for the {axis} ranks: add {axis!r} to links.")
        links = links[axis]
    if isinstance(links, str):
        if links not in LINKS:
            raise ValueError(
                f"link={links!r} is not known: use one of {', '.join(LINKS)}, or a Link of your own."
            )
        return LINKS[links]
    return links
