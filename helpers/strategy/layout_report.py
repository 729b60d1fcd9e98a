"""What the command says of a layout: the facts of its plan, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helpers.plan.report import AUTOCAST, three_figures, weights_in_words
from helpers.strategy.cluster import Cluster
from helpers.strategy.plan_layout import LayoutPlan
from helpers.timing.specs import SPECS
from helpers.units import duration, number, several, size

Facts = dict[str, Any]
BALANCED = (
    "Routing is taken to be balanced: each rank gets as many tokens for its experts as it sends to "
    "those of others. A rank that gets more needs more."
)


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
    if cluster.gpu.name not in SPECS:
        why = "a size says nothing of a GPU's speed: name the GPU (--list-gpus)."
        return {"seconds": None, "no_time": why}
    try:
        took = planned.step_seconds(cluster.gpu, cluster.links_of_axes(axes_of(planned.layout)))
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


def axes_of(layout: Any) -> dict[str, tuple[int, int]]:
    """{axis: (ranks between two neighbours on it, ranks that a whole group covers)}."""
    inner = layout.context * layout.tensor
    shard = layout.data // layout.replicate
    reach = shard * inner
    stage = layout.data * inner
    of_experts = {
        "expert": (1, layout.expert),
        "expert_data": (layout.expert, layout.data),
    }
    return {
        "tensor": (1, layout.tensor),
        "context": (layout.tensor, inner),
        "data": (layout.tensor, reach),
        "replicate": (reach, stage),
        "pipeline": (stage, layout.ranks),
    } | (of_experts if layout.expert > 1 else {})


def lines_of(facts: Mapping[str, Any], model: str) -> list[str]:
    """The text of the facts."""
    words = "YES, it fits" if facts["fits"] else "NO, it does not fit"
    room = "to spare" if facts["fits"] else "too much"
    over = abs(facts["need"] - facts["card_memory"])
    lines = [
        _settings(facts),
        f"{model}: {number(facts['parameters'])} parameters; "
        + several(facts["batch_size"], "example")
        + (f" of {facts['length']} tokens" if facts["length"] else "")
        + f", {facts['micro_batch']} per data rank and micro-batch"
        + (f", {facts['accumulation']} micro-batches" if facts["accumulation"] > 1 else ""),
        f"{facts['layout']} on {facts['cluster']}"
        + (f", schedule {facts['schedule']}" if facts["schedule"] else ""),
        *([BALANCED] if facts["balanced"] else []),
        f"{words}: {_who(facts)} needs {size(facts['need'])} of {size(facts['card_memory'])}, "
        f"{size(over)} {room}.",
        "",
        f"peak of the tensors per GPU, in the {facts['peak_phase']} phase: {size(facts['peak'])}",
    ]
    lines += [_line(category, count) for category, count in facts["at_peak"].items()]
    if facts["needs"]:
        lines += ["", "needed per GPU by the rank along the pipeline"]
        lines += [_line(f"{stage}", need) for stage, need in enumerate(facts["needs"])]
    lines += ["", "needed per GPU"]
    lines += [_line(term, count) for term, count in facts["terms"].items()]
    lines += ["", "sent per GPU and optimizer step"]
    sent = [
        _line(f"{axis}, {kind}", count)
        for axis, kinds in facts["sent"].items()
        for kind, count in kinds.items()
    ]
    lines += sent or ["  nothing"]
    return [*lines, "", *_times(facts)]


def _who(facts: Mapping[str, Any]) -> str:
    """The GPUs that need most."""
    if facts["stage"] is None:
        return "each GPU"
    return f"each GPU on rank {facts['stage']} of the pipeline, which needs most,"


def _times(facts: Mapping[str, Any]) -> list[str]:
    if facts["seconds"] is None:
        return [f"The time of a step is not planned: {facts['no_time']}"]
    waits = "".join(
        f" + {duration(seconds)} waiting for {axis} messages"
        + (f" ({duration(hidden)} more are hidden)" if hidden else "")
        for axis, seconds in facts["seconds_waiting"].items()
        for hidden in [facts["seconds_hidden"].get(axis, 0.0)]
    )
    if facts["seconds_of_bubble"]:
        waits = f" + {duration(facts['seconds_of_bubble'])} of bubble{waits}"
    rate = ""
    if facts["tokens_per_second"]:
        rate = (
            f": {three_figures(facts['tokens_per_second'])} tokens per second, "
            f"{three_figures(facts['tokens_per_second_per_gpu'])} per GPU"
        )
    work = duration(facts["seconds_of_work"])
    return [
        f"A step takes {duration(facts['seconds'])} ({work} of work{waits}){rate}.",
        f"With room to spare PyTorch would report {size(facts['allocated'])} allocated, "
        f"{size(facts['reserved'])} reserved.",
    ]


def _settings(facts: Mapping[str, Any]) -> str:
    precision = facts["precision"]
    if facts["reduce"] is None:
        engine = f"{weights_in_words(facts)}, {AUTOCAST[precision]}"
    else:
        engine = (
            f"{facts['weights']} shards, gathered and computed in {precision}, gradients summed in "
            f"{facts['reduce']} (FSDP2, MixedPrecisionPolicy)"
        )
    recompute = f"; {facts['recompute']} recomputation" if facts["recompute"] else ""
    return f"Planned: {engine}; {facts['optimizer']}{recompute}."


def _line(name: str, count: int) -> str:
    return f"  {name:26} {size(count):>12}"
