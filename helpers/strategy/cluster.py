"""A cluster of equal GPUs, and one candidate for a job on it: its memory, its time, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from helpers.gpus import GPU, as_gpu
from helpers.memory.timeline import Fit
from helpers.parallel import Parallel
from helpers.recipe import Recipe, difference
from helpers.strategy.plan_ranks import ParallelPlan
from helpers.strategy.step_time import Link, StepTime, find_link
from helpers.units import size, span
from helpers.values import whole

# Fields that change what is learnt. Accumulation and checkpointing, for example, do not.
OTHER_LEARNING = {"optimizer", "lora_rank"}
LIMITS = {
    "data": "data messages",
    "tensor": "tensor messages",
    "pipeline": "pipeline messages",
    "host": "host messages",
}
WORTH_A_WORD = 0.02  # fraction of the step below which communication is not mentioned


@dataclass(frozen=True, init=False)
class Cluster:
    """Machines with equal GPUs.

    gpu          a GPU, or the name of one in `gpus.GPUS`
    per_machine  GPUs per machine
    machines     number of machines
    inside       link between two GPUs of a machine; each pair has its full speed
    between      link of one network card of a machine to the other machines
    host         link of a GPU to the memory of its machine
    cards        network cards per machine; a DGX has one for each of its eight GPUs
    Links are a `Link` or the name of one in `step_time.LINKS`.
    Raises ValueError for an unknown GPU or link and for a number below 1, TypeError for a number
    that is not whole.
    """

    gpu: GPU
    per_machine: int
    machines: int
    inside: Link
    between: Link
    host: Link
    cards: int

    def __init__(
        self,
        gpu: GPU | str,
        per_machine: int = 1,
        machines: int = 1,
        inside: Link | str = "PCIe 3 x16",
        between: Link | str = "Ethernet 10 Gbit",
        host: Link | str = "PCIe 3 x16",
        cards: int = 1,
    ):
        whole("per_machine", per_machine, least=1)
        whole("machines", machines, least=1)
        whole("cards", cards, least=1)
        values = {
            "gpu": as_gpu(gpu),
            "per_machine": per_machine,
            "machines": machines,
            "inside": find_link(inside, "inside"),
            "between": find_link(between, "between"),
            "host": find_link(host, "host"),
            "cards": cards,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all machines."""
        return self.per_machine * self.machines

    def links(self, parallel: Parallel) -> dict[str, Link]:
        """{axis: the link that its messages use}.

        Ranks fill one machine after the other: tensor ranks lie next to each other, then data
        ranks, then stages. Groups of ranks that send out of a machine at the same time share its
        cards; a single group uses all of them, as NCCL does (github NVIDIA/nccl-tests, issue 119).
        Raises ValueError where the tensor ranks of a group would lie in more than one machine.
        """
        if self.per_machine % parallel.tensor:
            raise ValueError(
                f"tensor={parallel.tensor} ranks would lie in more than one machine of "
                f"{self.per_machine}: use a divisor of per_machine."
            )
        links = self.links_of_axes(
            {
                "data": (parallel.tensor, parallel.tensor * parallel.data),
                "pipeline": (parallel.tensor * parallel.data, parallel.ranks),
            }
        )
        return {"tensor": self.inside, **links}

    def links_of_axes(self, axes: Mapping[str, tuple[int, int]]) -> dict[str, Link]:
        """{axis: the link that its messages use}, as `links`, of any grid of ranks.

        axes  {axis: (stride, reach)}: neighbours on the axis are `stride` ranks apart, and a whole
              group covers `reach` ranks. Those of "expert" send each rank its own part
        """
        ranks = max(reach for _, reach in axes.values())
        links = {
            axis: self.inside
            if ranks <= self.per_machine or self.per_machine % reach == 0
            else self._shared(min(stride, self.per_machine))
            for axis, (stride, reach) in axes.items()
        }
        _, experts = axes.get("expert", (1, 1))
        if links.get("expert", self.inside) is not self.inside:
            links["expert"] = self._scattered(experts)
        return links

    def _scattered(self, ranks: int) -> Link:
        """The link of an all-to-all of so many neighbours that do not fit one machine.

        Each GPU has its share of the cards to itself, as an all-to-all cannot use several for one
        GPU (NCCL's maintainer, github NVIDIA/nccl-tests, issue 267). Only what leaves the machine
        goes over it, beside what stays, so that the whole message seems faster.
        """
        there = self.per_machine if ranks % self.per_machine == 0 else 1
        share = min(self.between.speed, self.between.speed * self.cards / self.per_machine)
        speed = min(share * (ranks - 1) / (ranks - there), self.inside.speed)
        return Link(f"{self._cards}, a share for each GPU", speed, self.between.latency)

    def _shared(self, groups: int) -> Link:
        """What each of so many groups of ranks gets of the links between machines.

        It is no more than the link inside a machine, over which a group's messages go as well.
        """
        shared = f", shared by {groups}" if groups > 1 else ""
        speed = self.between.speed * self.cards / groups
        if self.per_machine > 1:
            speed = min(speed, self.inside.speed)
        return Link(f"{self._cards}{shared}", speed, self.between.latency)

    @property
    def _cards(self) -> str:
        return f"{self.cards} × {self.between.name}" if self.cards > 1 else self.between.name

    def __str__(self) -> str:
        inside = f", {self.inside.name}" if self.per_machine > 1 else ""
        machine = f"{self.per_machine} × {self.gpu.name}{inside}"
        if self.machines == 1:
            return machine
        return f"{self.machines} machines of {machine}, {self._cards} between"


def name_of(changed: Mapping[str, object], parallel: Parallel, offload: bool = False) -> str:
    """The name of a candidate: its layout, then what it changes of the job, {field: new value}."""
    layout = "one GPU" if parallel.ranks == 1 else str(parallel)
    changes = [name if new is True else f"{name} {new}" for name, new in changed.items()]
    return ", ".join([layout, *changes, *["states off the GPU"] * offload])


@dataclass(frozen=True)
class Candidate:
    """One way to do a job on a cluster.

    job      the recipe that was asked for
    plan     the candidate's own recipe and layout, planned (`plan_cache.planned`)
    offload  whether the optimizer's states lie in the memory of the machine. Gradients are then
             sent there, and weights back, in each step (Ren et al. 2021, ZeRO-Offload). The time of
             the update itself, on the CPU, is not counted.
    """

    job: Recipe
    cluster: Cluster
    plan: ParallelPlan
    offload: bool = False

    @cached_property
    def changed(self) -> dict[str, object]:
        """{field: new value} of the fields of the recipe that differ from the job's."""
        return {name: new for name, (_, new) in difference(self.job, self.plan.recipe).items()}

    @property
    def parallel(self) -> Parallel:
        return self.plan.parallel

    @property
    def name(self) -> str:
        """The layout, then what is changed: "data 2, ZeRO-1", "one GPU, accumulation 8"."""
        return name_of(self.changed, self.parallel, self.offload)

    @cached_property
    def peak(self) -> int:
        """Bytes of tensors at the peak of the fullest rank."""
        return self.plan.fullest.without_states if self.offload else self.plan.peak

    @cached_property
    def fit(self) -> Fit:
        """Whether the fullest rank fits a GPU of the cluster."""
        fit = self.plan.fits(self.cluster.gpu)
        return Fit(fit.gpu, fit.terms | {"tensors at the peak": self.peak})

    @cached_property
    def time(self) -> StepTime:
        """Seconds of an optimizer step, by `step_time.step`."""
        time = self.plan.seconds(self.cluster.gpu, self.cluster.links(self.parallel))
        if self.offload:
            moved = 2 * self.plan.fullest.gradients  # gradients out, weights of that size back
            return replace(time, exposed={**time.exposed, "host": moved / self.cluster.host.speed})
        return time

    @property
    def examples_per_second(self) -> float:
        return self.job.batch_size / self.time.total

    @property
    def same(self) -> bool:
        """Whether it learns the same as the job would on one large GPU."""
        return not OTHER_LEARNING & set(self.changed)

    @property
    def changes(self) -> int:
        """Number of changed fields and of axes in use; ZeRO and offloading count as one each."""
        axes = (self.parallel.data > 1) + (self.parallel.pipeline > 1) + (self.parallel.tensor > 1)
        return len(self.changed) + axes + (self.parallel.zero_stage > 0) + self.offload

    @property
    def limit(self) -> str:
        """What stands in the way of more.

        "memory: <its largest part>" where it does not fit, else what takes most of the time.
        """
        if self.fit:
            return LIMITS.get(self.time.limit, self.time.limit)
        return f"memory: {self._largest_part}"

    @property
    def _largest_part(self) -> str:
        parts = dict(self.plan.at_peak)
        if self.offload:
            del parts["optimizer states"]
        return max(parts, key=lambda part: parts[part])

    @property
    def reason(self) -> str:
        """Why it fits or not and what it waits for, in words, from its own numbers."""
        if not self.fit:
            largest = self._largest_part
            return (
                f"Too much by {size(self.fit.over)}: "
                f"{self.plan.at_peak[largest] / self.peak:.0%} of the peak is {largest}."
            )
        sentences = [
            f"Fits with {size(-self.fit.over)} to spare; "
            f"{self.time.compute / self.time.total:.0%} of the step is work."
        ]
        if self.time.bubble:
            sentences.append(f"Stages wait {span(self.time.bubble)} for one another.")
        sentences += self._waits()
        if "lora_rank" in self.changed:
            sentences.append("It learns something else: adapters instead of the weights.")
        elif not self.same:
            sentences.append("It learns something else: its updates are rounded.")
        return " ".join(sentences)

    def _waits(self) -> list[str]:
        """A sentence for each axis whose messages take a noticeable part of the step."""
        links: Mapping[str, Link] = {
            **self.cluster.links(self.parallel),
            "host": self.cluster.host,
        }
        least = WORTH_A_WORD * self.time.total
        sentences = []
        for axis, seconds in sorted(self.time.exposed.items(), key=lambda pair: -pair[1]):
            if seconds > least:
                beside = self.time.hidden.get(axis, 0.0)
                hidden = f" ({span(beside)} more are hidden behind work)" if beside > least else ""
                sentences.append(
                    f"It waits {span(seconds)} for {axis} messages over {links[axis].name}{hidden}."
                )
        return sentences
