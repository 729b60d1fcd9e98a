"""What the plan of a layout says, as values that JSON holds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tight_fit.gpus.specs import no_speed, speed_of
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.plan import LayoutPlan, plan_step
from tight_fit.models.step import ModelStep

Facts = dict[str, Any]


def facts_of_step(job: ModelStep, layout: Layout, cluster: Cluster) -> Facts:
    """`facts_of` a step, which is planned once for all clusters. Raises what `plan_step` raises.

    job  its batch size is that of all GPUs
    """
    return facts_of(_planned(repr(job.config), job, layout), cluster)


@lru_cache(maxsize=64)
def _planned(config: str, job: ModelStep, layout: Layout) -> LayoutPlan:
    """A plan depends on no GPU and on no link. The configuration does not count when two steps are
    compared, and so its text is a key of its own."""
    return plan_step(job, layout)


def facts_of(planned: LayoutPlan, cluster: Cluster) -> Facts:
    """The plan as plain values: bytes, seconds, and what was planned.

    Messages are {axis: {collective: bytes that a rank sends per optimizer step}}. "balanced" says
    whether the plan takes each rank to get as many tokens for its experts as it sends. Of a
    pipeline, memory is that of the rank that needs most, "stage", and "needs" has the bytes of
    each.
    """
    step, layout = planned.recipe, planned.layout
    fits = [one.fits(cluster.gpu) for one in planned.ranks]
    fit = max(fits, key=lambda one: one.need)
    fullest = planned.ranks[fits.index(fit)]
    tokens: int | None = getattr(step, "tokens", None)
    facts: Facts = {
        "layout": str(layout),
        "gpus": layout.ranks,
        "cluster": str(cluster),
        "parameters": planned.parameters,
        "batch_size": step.batch_size,
        "micro_batch": step.batch_size // layout.data // step.accumulation,
        "accumulation": step.accumulation,
        "length": tokens,
        "weights": getattr(step, "weights", "fp32"),
        "base": step.base,
        "lora_rank": step.lora_rank,
        "lora_targets": step.lora_targets,
        "precision": step.precision,
        "optimizer": step.optimizer,
        "reduce": planned.reduce if layout.strategy != "ddp" else None,
        "recompute": _recompute(planned),
        "compile": planned.recipe.compile,
        **({"float8": step.float8} if step.float8 else {}),
        "balanced": layout.expert > 1,
        "schedule": layout.schedule if layout.pipeline > 1 else None,
        "stage": fullest.stage if layout.pipeline > 1 else None,
        "needs": [one.need for one in fits] if layout.pipeline > 1 else None,
        "peak": fullest.peak,
        "peak_phase": fullest.peak_phase,
        "at_peak": fullest.at_peak,
        "sent": planned.bytes_by_axis,
        "fits": bool(fit),
        "need": fit.need,
        "card": cluster.gpu.name,
        "card_memory": cluster.gpu.memory,
        "terms": fit.terms,
        **vars(fullest.allocator_peaks(cluster.gpu)),
    }
    return facts | _time(planned, cluster, tokens)


def _recompute(planned: LayoutPlan) -> str | None:
    if planned.selective:
        return "selective"
    return "full" if planned.recipe.checkpointing else None


def _time(planned: LayoutPlan, cluster: Cluster, tokens: int | None) -> Facts:
    if speed_of(cluster.gpu.name) is None:
        return {"seconds": None, "no_time": no_speed(cluster.gpu)}
    try:
        took = planned.seconds_on(cluster)
    except ValueError as error:
        return {"seconds": None, "no_time": str(error)}
    rate = planned.recipe.batch_size * tokens / took.total if tokens else None
    return {
        "seconds": took.total,
        "seconds_of_work": took.compute,
        "seconds_of_bubble": took.bubble,
        "seconds_waiting": dict(took.exposed),
        "seconds_hidden": dict(took.hidden),
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / planned.layout.ranks if rate else None,
        "limit": took.limit,
    }
