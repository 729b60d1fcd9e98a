"""The text of an answer, from its facts: the same whether they are new or were kept.

The first line says what was planned: dtypes, optimizer, and what was assumed.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from tight_fit.gpus import GPUS
from tight_fit.gpus.table import SPECS
from tight_fit.optimizer_kinds import FOREACH, KINDS
from tight_fit.units import a_gpu, duration, number, several, size, size_line

Facts = Mapping[str, Any]
# Fields whose option has another name, and values that are options of their own.
OPTIONS = {
    "batch_size": "batch",
    "lora_rank": "lora",
    "lora_targets": "targets",
    "side": "image-size",
}
FLAGS = {("loss", "chunked"): "chunked-loss", ("lora_scale", "alpha/sqrt(r)"): "rslora"}
AUTOCAST = {
    "fp32": "no autocast",
    "tf32": "TF32 products",
    "bf16": "bf16 autocast",
    "fp16": "fp16 autocast with loss scaling",
}


NOUNS = {"dpo": "pair", "grpo": "completion"}  # what an example is
REFERENCES = {
    "model": "a reference model in memory",
    "adapters-off": "the base without adapters as reference",
    "precomputed": "log-probabilities of the reference computed before",
    "none": "no reference",
}


def with_epoch(facts: Facts, examples: int | None, price: float | None) -> dict[str, Any]:
    """The facts with the hours of an epoch and its price.

    examples  of an epoch; None leaves out its hours
    price     of the GPU per hour; None leaves out the epoch's cost
    Raises ValueError where an epoch was asked for and there are no seconds.
    """
    if examples is None:
        return dict(facts)
    if facts.get("seconds") is None:
        raise ValueError(facts["no_time"])
    hours = ceil(examples / facts["batch_size"]) * facts["seconds"] / 3600
    more = {"examples": examples, "epoch_hours": hours}
    if price is not None:
        more |= {"price_per_hour": price, "epoch_cost": hours * price}
    return dict(facts) | more


def verdict(facts: Facts, others: Sequence[str] = ()) -> list[str]:
    """What was planned, and whether it fits; `others` are what the GPU's name may mean as well."""
    lines = [_settings(facts), _model(facts)]
    if "fits" in facts:
        over = facts["need"] - facts["card_memory"]
        words = "YES, it fits" if facts["fits"] else "NO, it does not fit"
        room = "to spare" if facts["fits"] else "too much"
        lines.append(
            f"{words} on {a_gpu(facts['card'])}: it needs {size(facts['need'])} of "
            f"{size(facts['card_memory'])}, {size(abs(over))} {room}."
        )
        if others:
            lines.append(f"(There is also the {' and the '.join(others)}: say which with --gpu.)")
    else:
        holding = [name for name, holds in facts["cards"].items() if holds]
        most = max(gpu.memory for gpu in GPUS.values())
        lines.append(
            f"GPUs that hold it: {', '.join(holding)} (--list-gpus has others)."
            if holding
            else f"None of the usual GPUs holds it, up to {size(most)} (--list-gpus has others)."
        )
    return lines


def advice(facts: Facts) -> list[str]:
    """What would fit, the smallest changes first, and the largest batch."""
    changes, largest, lines = facts["would_fit"], facts["largest_batch"], []
    if changes:
        alone = len(changes) > 1 or len(changes[0]) == 1
        lines.append(
            "What would fit, each change alone:"
            if alone
            else "What would fit, no change alone, but together:"
        )
        lines += [
            f"  {' '.join(option(*pair) for pair in change.items())}{_with_it(terms)}"
            for change, terms in zip(changes, facts["would_take"])
        ]
        lines += _recipe(facts)
    elif not facts["fits"]:
        lines.append(
            "No technique planned here makes it fit: take a smaller model, shorter examples or a "
            "larger GPU, or plan several with --gpus N. Not planned, and may help: "
            f"{', '.join(facts['not_planned'])}."
        )
    parts = f" ({facts['accumulation']} micro-batches)" if facts["accumulation"] > 1 else ""
    lines.append(
        f"Largest batch that fits as asked{parts}: {largest}"
        if largest
        else "As asked, not even one example per micro-batch fits."
    )
    return lines


def _with_it(terms: Facts) -> str:
    """What a step needs and takes with a change."""
    words = f"   (needs {size(terms['need'])}"
    return words + (f", {duration(terms['seconds'])} a step)" if terms["seconds"] else ")")


def _recipe(facts: Facts) -> list[str]:
    """The command with the change that gives the fastest step, or with the first change where no
    time is known, as it is typed."""
    timed = [
        (terms["seconds"], number)
        for number, terms in enumerate(facts["would_take"])
        if terms["seconds"]
    ]
    same = [entry for entry in timed if not _trains_others(facts["would_fit"][entry[1]])]
    change = facts["would_fit"][min(same or timed)[1] if timed else 0]
    given = {name: value for name, value in facts["asked"].items() if name not in change}
    typed = " ".join(option(*pair) for pair in (given | change).items() if pair[1] is not None)
    which = "" if len(facts["would_fit"]) == 1 else f" {_which(facts, change, bool(timed))}"
    model = shlex.quote(facts["model"])
    lines = [f'YES with{which}: tight-fit {model} --gpu "{facts["card"]}" {typed}']
    if timed and len(facts["would_fit"]) > 1:
        lines.append("(--fastest also searches combinations of what trains the same weights.)")
    return lines


def _trains_others(change: Facts) -> bool:
    """Whether a change trains adapters in place of the weights."""
    return change.get("lora_rank") is not None


def _which(facts: Facts, change: Facts, timed: bool) -> str:
    """Which of several changes it is, and whether it trains the same weights."""
    words = "the fastest of them" if timed else "the first of them"
    if _trains_others(change):
        return f"{words}, which trains adapters and not the weights"
    others = any(map(_trains_others, facts["would_fit"]))
    return f"{words} that trains the same weights" if timed and others else words


def details(facts: Facts) -> list[str]:
    """Where the bytes and the seconds go, and what to know about the plan."""
    lines = ["", f"peak of the tensors, in the {facts['peak_phase']} phase: {size(facts['peak'])}"]
    lines += [size_line(category, count) for category, count in facts["at_peak"].items()]
    if facts["host"]:
        lines.append(size_line("in the host's memory", facts["host"]))
    if "fits" in facts:
        lines += ["", f"on {a_gpu(facts['card'])}"]
        lines += [size_line(term, count) for term, count in facts["terms"].items()]
        lines += [
            size_line("needed", facts["need"]),
            size_line("the GPU has", facts["card_memory"]),
            "",
        ]
        lines += _time(facts)
        lines.append(
            f"With room to spare PyTorch would report {size(facts['allocated'])} allocated, "
            f"{size(facts['reserved'])} reserved."
        )
    lines += [f"Note: {note}" for note in facts["notes"]]
    if facts.get("shipped"):
        made = facts["planned_with"]
        lines.append(
            f"Note: this plan came with the package, made with PyTorch {made['torch']} and "
            f"transformers {made['transformers']}; --fresh plans with what is installed."
        )
    return lines


def weights_in_words(facts: Mapping[str, Any], why: str = "", held: str = "weights") -> str:
    """How a step holds its weights, and what is trained in their place.

    facts  "weights", "base", "lora_rank" and "lora_targets", as the fields of a `ModelStep`
    why    what is said after the dtype of weights that are not in 4 bits
    held   what a rank has of them: "weights", or "shards"
    """
    words = f"{facts['weights']} {held}{why}"
    if facts["base"] == "nf4":
        rest = facts["weights"]
        if facts.get("kbit"):
            rest = "fp32 (by prepare_model_for_kbit_training)"
        words = f"weights in 4 bits (NF4), {rest} where they are not quantized"
    if facts["lora_rank"] is not None:
        words += f", frozen; fp32 adapters of rank {facts['lora_rank']}"
        if facts["lora_targets"] != "query-value":
            words += f" ({facts['lora_targets']})"
    return words


def _settings(facts: Facts) -> str:
    """The line that comes first."""
    weights, precision, assumed = facts["weights"], facts["precision"], facts["assumed"]
    why = ""
    if "weights" in assumed and weights != "fp32":
        why = ", as its configuration says"
    elif "weights" in assumed and facts["weights_stored"] != weights:
        why = f" (stored as {facts['weights_stored']}, in which they cannot be trained)"
    words = weights_in_words(facts, why)
    words += f"; {AUTOCAST[precision]}"
    if facts.get("float8"):
        words += f", products of linear layers in FP8 scaled {facts['float8']}"
    words += f"; {_optimizer(facts)}{_attention(facts)}"
    guesses = [
        f"{'batch ' if name == 'batch_size' else ''}{value}{' tokens' if name == 'length' else ''} "
        f"(--{OPTIONS.get(name, name)})"
        for name, value in assumed.items()
        if name in ("batch_size", "length", "task")
    ]
    if weights != "fp32" and "weights" in assumed and facts["base"] is None:
        guesses.append(f"{weights} weights (--weights)")
    line = f"Planned: {words}." + (f" Assumed: {', '.join(guesses)}." if guesses else "")
    named = facts["task_named"]
    if "task" in assumed and named not in (None, facts["task"]):
        line += f" Its configuration names {named}."
    if facts["stored_quantized"]:
        line += " It is stored quantized, which is not planned."
    return line


def _optimizer(facts: Facts) -> str:
    """Its name and implementation, with what PyTorch and Trainer call it."""
    kind, usual = KINDS[facts["optimizer"]], facts.get("trainer_optimizer")
    called = []
    if kind.by == FOREACH:
        called.append("PyTorch's default on a GPU")
    if kind.trainer:
        default = "Trainer's default, " if kind.trainer == usual else "Trainer's "
        called.append(f"{default}{kind.trainer}")
    return kind.label + (f" ({'; '.join(called)})" if called else "")


def _attention(facts: Facts) -> str:
    """Whether the attention is one fused kernel, by the GPU and the dtype."""
    if facts.get("attention_taken") is None:
        return ""
    if facts["attention_taken"] == "eager":
        return "; eager attention, written out"
    if not facts.get("attention_fused", True):
        return f"; sdpa attention, written out, as the {facts['card']} has no fused kernel for it"
    return "; sdpa attention in a fused kernel"


def _model(facts: Facts) -> str:
    """The model and the step."""
    shape = []
    if facts["image"]:
        shape.append(" × ".join(map(str, facts["image"])) + " pixels")
    if facts["length"]:
        shape.append(f"{facts['length']} tokens")
    if facts.get("completion"):
        shape[-1] += f", {facts['completion']} of them written"
    noun = NOUNS.get(facts["task"], "example")
    settings = [f"{several(facts['batch_size'], noun)} of {' and '.join(shape)}"]
    if facts["task"] in NOUNS:
        settings.append(REFERENCES[facts["reference"]])
    if facts["accumulation"] > 1:
        settings.append(f"{facts['accumulation']} micro-batches")
    if facts["checkpointing"]:
        settings.append("checkpointing")
    if facts["loss"] == "chunked":
        settings.append("loss in chunks")
    if facts.get("compile"):
        settings.append("layers compiled")
    if facts["offload"] is not None:
        settings.append(f"{facts['offload']} on the host")
    if facts["optimizer_in_backward"]:
        settings.append("optimizer in the backward pass")
    if facts["lora_rank"] is not None:
        settings.append(f"LoRA rank {facts['lora_rank']}")
    if facts["frozen"] is not None:
        settings.append(f"embeddings and {several(facts['frozen'], 'layer')} frozen")
    parameters = number(facts["parameters"])
    return f"{facts['model']}: {facts['class']}, {parameters} parameters; {', '.join(settings)}"


def _time(facts: Facts) -> list[str]:
    """The lines on time."""
    if facts["seconds"] is None:
        if facts.get("seconds_by_gpu"):
            return [_range(facts["seconds_by_gpu"], facts["card"])]
        return [f"The time of a step is not planned: {facts['no_time']}"]
    rates = [f"{three_figures(facts['examples_per_second'])} examples per second"]
    if facts["tokens_per_second"]:
        rates.append(f"{three_figures(facts['tokens_per_second'])} tokens per second")
    rates.append(f"MFU {facts['mfu']:.0%}")
    low, high = duration(facts["seconds_low"]), duration(facts["seconds_high"])
    took = f"A step takes {duration(facts['seconds'])} ({low} to {high})"
    lines = [f"{took}: {', '.join(rates)}."]
    if facts.get("calibrated"):
        lines.append(
            f"As tight-fit calibrate measured the {facts['card']} on {facts['calibrated']}."
        )
    elif facts["kernels_measured_on"] != facts["card"]:
        lines.append(
            f"No kernels of the {facts['card']} were measured: those of the "
            f"{facts['kernels_measured_on']} stand for them."
        )
        if watts := SPECS[facts["card"]].watts:
            lines.append(f"It is planned for its limit of {watts} W: with less it takes longer.")
    if "epoch_hours" in facts:
        cost = ""
        if "epoch_cost" in facts:
            cost = f" and costs {facts['epoch_cost']:,.2f} at {facts['price_per_hour']:g} per hour"
        hours = f"{three_figures(facts['epoch_hours'])} hours"
        lines.append(f"An epoch of {facts['examples']:,} examples takes {hours}{cost}.")
    return lines


def _range(seconds: Mapping[str, float], size: str) -> str:
    """The seconds on the GPUs of a size, from the fastest to the slowest."""
    fast, slow = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    least = duration(seconds[fast])
    if fast == slow:
        return f"A step takes {least} on the {fast}, the GPU of {size} that runs it."
    return (
        f"A step takes {least} (on the {fast}) to {duration(seconds[slow])} (on the {slow}): the "
        f"fastest and the slowest of the {len(seconds)} GPUs of {size} that run it. Name the GPU "
        "for its own time (--list-gpus)."
    )


def three_figures(count: float) -> str:
    """A number in three figures or all its whole ones: 0.0123, 4.56, 12,345."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def option(name: str, value: object) -> str:
    """A changed field as it is typed in a shell."""
    if isinstance(value, str) and (name, value) in FLAGS:
        return f"--{FLAGS[name, value]}"
    typed = "--" + OPTIONS.get(name, name).replace("_", "-")
    return typed if value is True else f"{typed} {shlex.quote(str(value))}"
