"""What a search of layouts tries, and what arithmetic says of a trial before it is planned.

A trial needs at least its weights and states and its share of what one plan, the reference, keeps
of the layers; it takes at least the work that grows with the tokens, and the time of its messages.
Both are lower bounds: a layout shards the layers and sends messages, and what a layer computes of
each token stays the same. What does not grow with the tokens is left out, as the optimizer and the
least time of a kernel are another number on another layout; but for FSDP2's copies of weights and
gradients, which each micro-batch makes anew.
Expert ranks gather fewer experts each and send tokens instead, which their bounds follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tight_fit.gpus import NCCL
from tight_fit.kernels.kernel_time import constants, seconds_at_full_rate
from tight_fit.layouts.clocks import SLOWER
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import STRATEGIES, Layout
from tight_fit.layouts.plan import LayoutPlan
from tight_fit.layouts.trace import STREAMS
from tight_fit.memory.plan import fit_on_gpu
from tight_fit.models.step import ModelStep
from tight_fit.search.experts import ALL_TO_ALLS, NO_EXPERTS, Experts, expert_layouts
from tight_fit.techniques.precision import AUTOCAST, DTYPES
from tight_fit.trace.storage_trace import ACTIVATIONS, PHASES

# Candidates whose times differ by no more than this fraction are a tie: no plan is that exact.
TIE = 0.05
RECOMPUTED = ("none", "selective", "full")  # from the least to the most
# Autocast takes other kernels than FSDP2 does, and small micro-batches fit into caches.
LIKE_ENOUGH = 0.9
# What FSDP2 does with weights and gradients, whatever the tokens (torch's names).
GATHERED = ("all_gather_copy_in", "split_with_sizes_copy", "_foreach_copy_")
SCATTERED = "chunk_cat"
OF_WEIGHTS = (*GATHERED, SCATTERED, "embedding_dense_backward")
IN_A_LAYER = 8  # messages of tensor ranks in a layer, forward and backward, without recomputation


@dataclass(frozen=True)
class Trial:
    """One way to lay out a step: layout, what is recomputed, and the number of micro-batches."""

    layout: Layout
    recompute: str = "none"
    accumulation: int = 1

    @property
    def axes(self) -> int:
        """Axes along which there is more than one rank; replicas are an axis beside data ranks, and
        so are expert ranks, which divide what data ranks alone do not."""
        layout = self.layout
        return sum(
            getattr(layout, axis) > 1
            for axis in ("data", "replicate", "context", "tensor", "expert", "pipeline")
        )

    @property
    def simplicity(self) -> tuple[int, int, int, int]:
        """What is less is simpler: axes, recomputation, micro-batches, and how much is sharded."""
        return (
            self.axes,
            RECOMPUTED.index(self.recompute),
            self.accumulation,
            STRATEGIES.index(self.layout.strategy),
        )

    def adds_work_to(self, other: Trial) -> bool:
        """Whether this does what the other does, and recomputes more or has more micro-batches;
        in a pipeline more of them shorten the bubble, and only as many are compared. With one
        micro-batch stage 2 of ZeRO is stage 1."""
        more, layout = self.accumulation - other.accumulation, other.layout
        if (self.layout.strategy, layout.strategy, other.accumulation) == ("zero1", "zero2", 1):
            layout = replace(layout, strategy="zero1")
        return (
            self != other
            and self.layout == layout
            and RECOMPUTED.index(self.recompute) >= RECOMPUTED.index(other.recompute)
            and (more == 0 if self.layout.pipeline > 1 else more >= 0)
        )

    def step(self, job: ModelStep) -> ModelStep:
        """The job with this trial's micro-batches and recomputation. Raises ValueError."""
        return replace(job, accumulation=self.accumulation, checkpointing=self.recompute != "none")

    def __str__(self) -> str:
        parts = ["one GPU" if self.layout.ranks == 1 else str(self.layout)]
        parts += [f"{self.recompute} recomputation"] if self.recompute != "none" else []
        parts += [f"{self.accumulation} micro-batches"] if self.accumulation > 1 else []
        return ", ".join(parts)


def layouts_of(cluster: Cluster, experts: int = 1) -> list[Layout]:
    """One GPU, then every layout of all GPUs that is tried, from the simplest on.

    experts  of a layer of the model, which expert ranks must divide; 1 without experts

    These are DDP, the stages of ZeRO (FSDP2 that keeps weights gathered is stage 2), FSDP2, HSDP
    with a replica in each machine, FSDP2 with tensor or context ranks inside a machine, the latter
    with a replica in each machine too, FSDP2 with expert ranks inside a machine or over all GPUs,
    and a pipeline (1F1B) with a stage in each machine.
    """
    gpus, inside = cluster.gpus, cluster.per_machine
    found = [Layout(1, "ddp")]
    if gpus == 1:
        return found
    found += [Layout(gpus, strategy) for strategy in STRATEGIES]
    if cluster.machines > 1 and inside > 1:
        found.append(Layout(gpus, replicate=cluster.machines))
    for count in (number for number in range(2, inside + 1) if inside % number == 0):
        found.append(Layout(gpus // count, tensor=count))
        found.append(Layout(gpus // count, context=count))
        if cluster.machines > 1:
            found.append(Layout(gpus // count, replicate=cluster.machines, context=count))
    found += expert_layouts(cluster, experts)
    if cluster.machines > 1:
        found.append(Layout(inside, "fsdp" if inside > 1 else "ddp", pipeline=cluster.machines))
    return found


def accumulations(layout: Layout, job: ModelStep, gpus: int, given: int | None) -> list[int]:
    """Numbers of micro-batches to try with a layout, ascending.

    given  the only one that may be taken; None takes all that divide the examples of a data rank
    Left out is what another layout does as well: stage 1 of ZeRO with one micro-batch is stage 2,
    and context ranks that hold as many tokens at once as data ranks alone could. A pipeline takes
    as many as it has stages at the least, and four times as many at the most, where little of its
    bubble is left.
    """
    examples = job.batch_size // layout.data
    numbers = [number for number in range(1, examples + 1) if examples % number == 0]
    if layout.pipeline > 1:
        numbers = [number for number in numbers if 1 <= number / layout.pipeline <= 4]
    if given is not None:
        return [number for number in numbers if number == given]
    if layout.strategy == "zero1":
        numbers = [number for number in numbers if number > 1]
    if layout.context > 1:
        numbers = [number for number in numbers if job.batch_size % (gpus * number)]
    return numbers


@dataclass(frozen=True)
class Reference:
    """What bounds take from the plan of FSDP2 with one micro-batch and some recomputation.

    ranks       of the plan, all of them data ranks
    work        seconds of the kernels that work on tokens, forward and backward
    growing     of these what grows with the tokens: without the time that any kernel takes
    products    of these only matrix products, each at the rate of large ones
    kept        {"activations", "temporaries": bytes at its peak}
    parameters  of the model
    of_tokens   bytes of activations at its peak, without those in which weights are gathered
    forward     bytes of activations at the end of its forward pass
    gathering   seconds of the copies that gather the weights for a forward pass
    regathering  the same for a backward pass
    scattering  seconds of the copies that lay out gradients for their sum
    dispatched  numbers that a rank would send to experts in a forward pass
    experts     of the model
    """

    ranks: int
    work: float
    growing: float
    products: float
    kept: dict[str, int]
    parameters: int
    of_tokens: int
    forward: int
    gathering: float
    regathering: float
    scattering: float
    dispatched: float
    experts: Experts

    @classmethod
    def of(cls, planned: LayoutPlan, gpu: Any, experts: Experts = NO_EXPERTS) -> Reference:
        """The reference that a plan, of a model with such experts, is for a GPU of known speed."""
        alone, tf32 = planned.seconds(gpu), planned.recipe.precision == "tf32"
        gap = constants()["shared"]["gap"]
        work = growing = products = 0.0
        copying: dict[tuple[str, bool], float] = defaultdict(float)
        for kernel in alone.kernels:
            op = kernel.op
            if op.name in (*GATHERED, SCATTERED):
                copying[kernel.phase, op.name in GATHERED] += kernel.seconds
            if kernel.phase == "optimizer" or op.name in OF_WEIGHTS:
                continue
            limit = kernel.times * seconds_at_full_rate(op, alone.gpu, tf32)
            moving = 0.0 if limit else max(0.0, kernel.seconds - kernel.times * op.kernels * gap)
            work += kernel.seconds
            growing += limit + moving
            products += limit
        return cls(
            planned.layout.ranks,
            work,
            growing,
            products,
            planned.at_peak,
            planned.parameters,
            sum(
                count
                for count, category, made_by in planned.largest_tensors
                if category == "activations" and made_by not in STREAMS[1:]
            ),
            _at_the_end_of_forward(planned),
            copying["forward", True],
            copying["backward", True],
            copying["backward", False],
            experts.dispatched(alone),
            experts,
        )


def _at_the_end_of_forward(planned: LayoutPlan) -> int:
    before = np.flatnonzero(planned.phases <= PHASES.index("forward"))
    return int(planned.timeline[before[-1], ACTIVATIONS])


def reference_layout(job: ModelStep, gpus: int) -> Layout:
    """FSDP2 over as many GPUs as divide the examples."""
    return Layout(max(n for n in range(1, gpus + 1) if gpus % n == 0 and job.batch_size % n == 0))


def least_peak(trial: Trial, job: ModelStep, like: Reference, reduce: str = "fp32") -> float:
    """Bytes that the tensors of a rank take at the least: its weights, AdamW's two states, and its
    share of what the reference, with the same recomputation, keeps of the layers. Of DDP and of
    expert ranks, which gather nothing or fewer weights, that is activations alone. With the stages
    of ZeRO all weights are gathered when the forward pass ends."""
    layout, several = trial.layout, trial.accumulation > 1
    if layout.pipeline > 1:
        return _least_of_a_stage(trial, job, like)
    weights = like.parameters * DTYPES[job.weights or "fp32"].itemsize / layout.tensor
    at_once = like.ranks / (layout.ranks * trial.accumulation)  # of the reference's tokens
    if layout.strategy == "ddp":
        gradients = layout.data > 1 or several  # DDP's buckets stay
        return weights * (3 + gradients) + like.of_tokens * at_once
    if layout.expert > 1:  # a part of the experts is gathered, and has gradients
        return (3 + several) * weights / layout.shard + like.of_tokens * at_once
    kept = like.kept["activations"] + like.kept["temporaries"] / layout.tensor
    kept *= at_once
    if layout.strategy in ("zero1", "zero2"):
        kept = max(kept, like.parameters * _compute(job) + like.forward * at_once)
    summed = weights / layout.shard
    if layout.strategy == "zero1":  # whole, in the dtype in which they are summed
        summed = like.parameters * DTYPES[reduce].itemsize
    return 3 * weights / layout.shard + several * summed + kept


def _least_of_a_stage(trial: Trial, job: ModelStep, like: Reference) -> float:
    """The same of a pipeline. Its first and its last stage have at least their share of the
    weights, as one has the embeddings too and one the head. Before its first backward pass the
    first holds as many micro-batches as there are stages, all layers' activations of one; the last
    holds the logits. So one of the two holds half of both."""
    layout = trial.layout
    own = like.parameters / layout.pipeline
    weights = own * DTYPES[job.weights or "fp32"].itemsize
    of_tokens = max(0.0, like.kept["activations"] - like.parameters * _compute(job))
    at_once = like.ranks * layout.pipeline / (layout.ranks * trial.accumulation)
    activations = of_tokens * at_once / 2
    if layout.strategy == "ddp":
        return 3 * weights + max(weights, activations)
    whole = own * _compute(job) if layout.shard > 1 else 0.0  # gathered, and gradients as many
    return 3 * weights / layout.shard + max(2 * whole, activations)


def least_need(
    trial: Trial, job: ModelStep, like: Reference, cluster: Cluster, reduce: str = "fp32"
) -> int:
    """Bytes that a trial needs on each GPU at the least."""
    return _need_of(least_peak(trial, job, like, reduce), trial, cluster)


def least_need_beside(at_peak: Mapping[str, int], at: Trial, trial: Trial, cluster: Cluster) -> int:
    """Bytes that a trial needs at the least, from the peak of another number of micro-batches.

    The tensors that depend on the tokens at once shrink with them. What the allocator needs beside
    tensors is left out, as it may be less in any other step.

    at_peak  {category: bytes} of `at`, which has gradients beside its activations
    """
    growing = at_peak["activations"] + at_peak["temporaries"]
    fixed = sum(at_peak.values()) - growing
    peak = fixed + growing * min(1.0, at.accumulation / trial.accumulation)
    return _need_of(peak, trial, cluster)


def _need_of(peak: float, trial: Trial, cluster: Cluster) -> int:
    nccl = NCCL if trial.layout.ranks > 1 else 0
    return fit_on_gpu(cluster.gpu, int(peak), 0).need + nccl


def least_seconds(
    trial: Trial, job: ModelStep, like: Reference, cluster: Cluster, reduce: str = "fp32"
) -> float:
    """Seconds that a step takes at the least: the reference's work on tokens, divided over the
    ranks, FSDP2's copies of weights and gradients, what tensor and expert ranks wait for, and the
    bubble of a pipeline, whose last stage has the head and so its share at least; or the messages
    of the data ranks or of the replicas, if these are more.
    """
    layout, links = trial.layout, cluster.links_of_axes(trial.layout.axes)
    times = like.ranks / layout.ranks  # as many tokens as a rank of the reference has
    same = layout.tensor == layout.pipeline == layout.expert == times == 1
    if layout.strategy != "ddp" and same:
        work = LIKE_ENOUGH * like.work  # the same kernels
    elif (
        times * layout.pipeline >= trial.accumulation
    ):  # kernels as large as those of the reference, or larger
        work = LIKE_ENOUGH * like.growing * times
    else:
        work = like.products * times
    summed = DTYPES[reduce].itemsize
    work += LIKE_ENOUGH * _of_weights(trial, like, summed / links["data"].speed)
    work *= 1 + (layout.pipeline - 1) / trial.accumulation
    if layout.tensor > 1:
        config: Any = job.config
        tokens = job.batch_size // layout.data * (job.tokens or 1)
        one = tokens * config.hidden_size * _compute(job) * (1 - 1 / layout.tensor)
        work += IN_A_LAYER * config.num_hidden_layers * one / links["tensor"].speed
    if layout.expert > 1:
        one = like.dispatched * times * _compute(job) * (1 - 1 / layout.expert)
        work += ALL_TO_ALLS * one / links["expert"].speed
    sent = _sent(trial, job, like, summed)
    took = {axis: count / links[axis].speed for axis, count in sent.items()}
    took["data"] += took.pop("expert_data", 0.0)  # one after the other
    return max(work, *took.values())


def _of_weights(trial: Trial, like: Reference, each: float) -> float:
    """Seconds of FSDP2's copies of weights and gradients, and by how much the work is slower while
    gradients, of `each` seconds, are summed beside it."""
    layout = trial.layout
    if layout.strategy == "ddp" or layout.pipeline > 1 or layout.expert > 1:
        return 0.0
    sums = 1 if layout.strategy == "zero1" else trial.accumulation
    gathering = like.gathering + layout.reshards * like.regathering
    copying = trial.accumulation * gathering + sums * like.scattering
    copying *= like.ranks / max(like.ranks, layout.shard)  # some copies are of a shard
    summing = sums * like.parameters * (1 - 1 / layout.shard) * each
    return (copying + (1 - 1 / SLOWER) * summing) / layout.tensor


def _compute(job: ModelStep) -> int:
    """Bytes of a number that FSDP2 gathers and layers hand on."""
    return 2 if job.precision in AUTOCAST else DTYPES[job.weights or "fp32"].itemsize


def _sent(trial: Trial, job: ModelStep, like: Reference, reduce: int) -> dict[str, float]:
    """{axis: bytes that a rank sends at the least}: weights once per micro-batch, and gradients; in
    a pipeline both once per step. With expert ranks its experts only go to those of "expert_data".
    """
    layout = trial.layout
    parameters = like.parameters / (layout.tensor * layout.pipeline)
    times = trial.accumulation if layout.pipeline == 1 else 1
    if layout.strategy == "ddp":
        whole = 2 * DTYPES[job.weights or "fp32"].itemsize * parameters
        return {"data": whole * (1 - 1 / layout.data)}
    if layout.expert > 1:
        each, experts = times * (_compute(job) + reduce), like.experts.parameters
        alike = layout.data // layout.expert
        return {
            "data": each * (parameters - experts) * (1 - 1 / layout.data),
            "expert_data": each * experts / layout.expert * (1 - 1 / alike),
        }
    gathered = times * _compute(job) * parameters
    reduced = (1 if layout.strategy == "zero1" else times) * reduce * parameters
    sent = {"data": (gathered + reduced) * (1 - 1 / layout.shard)}
    if layout.replicate > 1:
        # Replicas sum the shards that data ranks have summed.
        sent["replicate"] = 2 * reduced / layout.shard * (1 - 1 / layout.replicate)
    return sent
