"""A cluster of equal GPUs, and which links the messages of a layout use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tight_fit.checks import whole
from tight_fit.gpus import GPU, as_gpu
from tight_fit.layouts.seconds import Link, find_link


@dataclass(frozen=True, init=False)
class Cluster:
    """Machines with equal GPUs.

    >>> from tight_fit import Cluster
    >>> print(Cluster("H100", per_machine=8, machines=2, inside="NVLink 4", cards=8))
    2 machines of 8 × H100, NVLink 4, 8 × Ethernet 10 Gbit between

    gpu          a GPU, or the name of one in `gpus.GPUS`
    per_machine  GPUs per machine
    machines     number of machines
    inside       link between two GPUs of a machine; each pair has its full speed
    between      link of one network card of a machine to the other machines
    cards        network cards per machine; a DGX has one for each of its eight GPUs
    Links are a `Link` or the name of one in `layouts.seconds.LINKS`.
    Raises ValueError for an unknown GPU or link and for a number below 1, TypeError for a number
    that is not whole.
    """

    gpu: GPU
    per_machine: int
    machines: int
    inside: Link
    between: Link
    cards: int

    def __init__(
        self,
        gpu: GPU | str,
        per_machine: int = 1,
        machines: int = 1,
        inside: Link | str = "PCIe 3 x16",
        between: Link | str = "Ethernet 10 Gbit",
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
            "cards": cards,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all machines."""
        return self.per_machine * self.machines

    def links_of_axes(self, axes: Mapping[str, tuple[int, int]]) -> dict[str, Link]:
        """{axis: the link that its messages use} of a grid of ranks, as `Layout.axes` gives it.

        axes  {axis: (stride, reach)}: neighbours on the axis are `stride` ranks apart, and a whole
              group covers `reach` ranks. Those of "expert" send each rank its own part
        Ranks fill one machine after the other. Groups of ranks that send out of a machine at the
        same time share its cards; a single group uses all of them, as NCCL does (github
        NVIDIA/nccl-tests, issue 119).
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
