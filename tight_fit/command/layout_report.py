"""What the command says of a layout: the facts of its plan, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tight_fit.command.report import AUTOCAST, three_figures, weights_in_words
from tight_fit.units import duration, number, several, size, size_line

WIDE = 26  # characters of a name: those of messages are long
BALANCED = (
    "Routing is taken to be balanced: each rank gets as many tokens for its experts as it sends to "
    "those of others. A rank that gets more needs more."
)


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
    lines += [size_line(category, count, WIDE) for category, count in facts["at_peak"].items()]
    if facts["needs"]:
        lines += ["", "needed per GPU by the rank along the pipeline"]
        lines += [size_line(f"{stage}", need, WIDE) for stage, need in enumerate(facts["needs"])]
    lines += ["", "needed per GPU"]
    lines += [size_line(term, count, WIDE) for term, count in facts["terms"].items()]
    lines += ["", "sent per GPU and optimizer step"]
    sent = [
        size_line(f"{axis}, {kind}", count, WIDE)
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
            f"{weights_in_words(facts, held='shards')}, gathered and computed in {precision}, "
            f"gradients summed in {facts['reduce']} (FSDP2, MixedPrecisionPolicy)"
        )
    recompute = f"; {facts['recompute']} recomputation" if facts["recompute"] else ""
    scaler = ", loss scaling" if facts["reduce"] and precision == "fp16" else ""
    compiled = "; each layer compiled" if facts.get("compile") else ""
    if facts.get("float8"):
        compiled += (
            f", products of linear layers in FP8 scaled {facts['float8']}, weights gathered in "
            f"{precision}: take the seconds for a lower bound"
        )
    line = f"Planned: {engine}{scaler}; {facts['optimizer']}{recompute}{compiled}."
    if facts["reduce"] and facts["base"] == "nf4":
        line += (
            f" FSDP2 divides 4-bit weights only if bnb_4bit_quant_storage is {facts['weights']}; "
            "their scales stay whole on each GPU."
        )
    return line
