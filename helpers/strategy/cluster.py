"""A strategy on a park of machines: what it takes, how long a step lasts, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from helpers.gpus import GPU, find
from helpers.memory.timeline import Fit
from helpers.parallel import Parallel
from helpers.recipe import Recipe, difference
from helpers.strategy import step_time
from helpers.strategy.plan_ranks import ParallelPlan
from helpers.strategy.step_time import Link, StepTime
from helpers.units import duration, size

OTHER_LEARNING = (
    "optimizer",
    "lora_rank",
)  # what changes what is learnt, where accumulation and checkpointing do not
LIMITS = {
    "data": "data messages",
    "tensor": "tensor messages",
    "pipeline": "pipeline messages",
    "host": "host messages",
}


def span(seconds: float) -> str:
    """Seconds in three figures, a short step's too: 0.494 ms, 85.0 ms, 1.3 s."""
    return duration(seconds) if seconds >= 1 else f"{seconds * 1e3:#.3g}".rstrip(".") + " ms"


@dataclass(frozen=True)
class Cluster:
    """`machines` with `per_machine` equal cards each.

    inside   link between two cards of a machine, each pair at full speed
    between  link that a machine has to the others, which all its cards share
    host     link of a card to its machine's memory
    Raises ValueError for an unknown card or link and for a number below 1.
    """

    gpu: GPU | str
    per_machine: int = 1
    machines: int = 1
    inside: Link | str = "PCIe 3 x16"
    between: Link | str = "Ethernet 10 Gbit"
    host: Link | str = "PCIe 3 x16"

    def __post_init__(self):
        object.__setattr__(self, "gpu", find(self.gpu) if isinstance(self.gpu, str) else self.gpu)
        for name in ("per_machine", "machines"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number from 1 on.")
        for name in ("inside", "between", "host"):
            object.__setattr__(self, name, step_time._link(getattr(self, name), name))

    @property
    def gpus(self) -> int:
        return self.per_machine * self.machines

    def links(self, parallel: Parallel) -> dict[str, Link]:
        """The link of each axis, when ranks fill one machine after the other, tensor ranks next to each other, then data,
        then pipeline. Lines of ranks that leave a machine at once share its link.

        Raises ValueError where tensor ranks would lie in two machines.
        """
        if self.per_machine % parallel.tensor:
            raise ValueError(
                f"tensor={parallel.tensor} ranks would lie in more than one machine of {self.per_machine}: use a "
                "divisor of per_machine."
            )
        found = {"tensor": self.inside}
        for axis, step, reach in (
            ("data", parallel.tensor, parallel.tensor * parallel.data),
            ("pipeline", parallel.tensor * parallel.data, parallel.ranks),
        ):
            lines = min(step, self.per_machine)
            shared = f"{self.between.name}, shared by {lines}" if lines > 1 else self.between.name
            within = parallel.ranks <= self.per_machine or self.per_machine % reach == 0
            found[axis] = (
                self.inside
                if within
                else Link(shared, self.between.speed / lines, self.between.latency)
            )
        return found

    def __str__(self) -> str:
        inside = f", {self.inside.name}" if self.per_machine > 1 else ""
        one = f"{self.per_machine} × {self.gpu.name}{inside}"
        return (
            one
            if self.machines == 1
            else f"{self.machines} machines of {one}, {self.between.name} between"
        )


@dataclass(frozen=True)
class Candidate:
    """One candidate. changed: fields of the recipe that differ from the job's; offload: optimizer states in the machine's
    memory, gradients sent there and weights back in each step (Ren et al. 2021; the update itself, on the CPU, is not
    counted); time, fit: as `cost.step` and `Plan.fits` give them, of the fullest rank."""

    job: Recipe
    cluster: Cluster
    plan: ParallelPlan
    offload: bool = False

    @cached_property
    def changed(self) -> dict:
        return {name: new for name, (_, new) in difference(self.job, self.plan.recipe).items()}

    @property
    def parallel(self) -> Parallel:
        return self.plan.parallel

    @property
    def name(self) -> str:
        laid = "one card" if self.parallel.ranks == 1 else str(self.parallel)
        told = [name if new is True else f"{name} {new}" for name, new in self.changed.items()]
        return ", ".join([laid, *told, *["states off the card"] * self.offload])

    @cached_property
    def peak(self) -> int:
        """Bytes of tensors at the peak of the fullest rank."""
        return self.plan.fullest.without_states if self.offload else self.plan.peak

    @cached_property
    def fit(self) -> Fit:
        found = self.plan.fits(self.cluster.gpu)
        return Fit(found.gpu, found.terms | {"tensors at the peak": self.peak})

    @cached_property
    def time(self) -> StepTime:
        made = self.plan.seconds(self.cluster.gpu, self.cluster.links(self.parallel))
        if self.offload:
            there = self.plan.fullest.gradients
            made = replace(
                made, exposed={**made.exposed, "host": 2 * there / self.cluster.host.speed}
            )
        return made

    @property
    def rows_per_second(self) -> float:
        return self.job.batch_size / self.time.total

    @property
    def same(self) -> bool:
        """Whether the same is learnt as by the job on one large card."""
        return not set(self.changed) & set(OTHER_LEARNING)

    @property
    def changes(self) -> int:
        """Changed fields, axes in use, and one each for sharing out and for states off the card."""
        axes = (self.parallel.data > 1) + (self.parallel.pipeline > 1) + (self.parallel.tensor > 1)
        return len(self.changed) + axes + (self.parallel.zero_stage > 0) + self.offload

    @property
    def limit(self) -> str:
        """What stands in the way of more: "memory: <its largest part>" where it does not fit, else what takes most time."""
        if not self.fit:
            parts = dict(self.plan.at_peak)
            if self.offload:
                del parts["optimizer states"]
            return f"memory: {max(parts, key=parts.get)}"
        return LIMITS.get(self.time.limit, self.time.limit)

    @property
    def reason(self) -> str:
        """In words, from its own numbers."""
        at_peak, time = self.plan.at_peak, self.time
        if not self.fit:
            largest = self.limit.removeprefix("memory: ")
            return f"Too much by {size(self.fit.over)}: {at_peak[largest] / self.peak:.0%} of the peak is {largest}."
        told = [
            f"Fits with {size(-self.fit.over)} to spare; {time.compute / time.total:.0%} of the step is work."
        ]
        if time.bubble:
            told.append(f"Stages wait {span(time.bubble)} for one another.")
        waits = {
            axis: seconds for axis, seconds in time.exposed.items() if seconds > 0.02 * time.total
        }
        for axis, seconds in sorted(waits.items(), key=lambda pair: -pair[1]):
            link = self.cluster.host if axis == "host" else self.cluster.links(self.parallel)[axis]
            beside = time.hidden.get(axis, 0.0)
            hidden = (
                f" ({span(beside)} more are hidden behind work)"
                if beside > 0.02 * time.total
                else ""
            )
            told.append(f"It waits {span(seconds)} for {axis} messages over {link.name}{hidden}.")
        if not self.same:
            told.append(
                "It learns something else: "
                + (
                    "adapters instead of the weights."
                    if "lora_rank" in self.changed
                    else "its updates are rounded."
                )
            )
        return " ".join(told)
