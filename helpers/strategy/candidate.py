"""One candidate for a job on a cluster: its memory, its time, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from helpers.parallel.layout import Parallel
from helpers.recipe import Recipe, difference
from helpers.strategy.plan_ranks import ParallelPlan
from tight_fit.layouts.cluster import LIMITS, Cluster
from tight_fit.layouts.seconds import Link, StepTime
from tight_fit.memory.plan import Fit
from tight_fit.units import size, span

# Fields that change what is learnt. Accumulation and checkpointing, for example, do not.
OTHER_LEARNING = {"optimizer", "lora_rank"}
WORTH_A_WORD = 0.02  # fraction of the step below which communication is not mentioned


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
        """Seconds of an optimizer step, by `layouts.seconds.step`."""
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
