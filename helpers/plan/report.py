"""What `python -m helpers.plan` prints: the plan, whether it fits, and what would fit."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import fields
from math import ceil
from typing import Any

from helpers import models
from helpers.gpus import GPU, GPUS, find
from helpers.memory.timeline import Fit, Plan
from helpers.plan import hf_config
from helpers.plan.hf_model import ModelStep
from helpers.plan.remedies import Change, Remedies
from helpers.units import duration, number, size


def report(asked: argparse.Namespace) -> int:
    """Print what was asked for and return the exit status, 1 where the step does not fit.

    asked  the options of `command.parser`
    Raises what `hf_plan.plan_model` and `gpus.find` raise.
    """
    # PyTorch logs its own account of what ends in our one sentence.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), models.quiet():
        warnings.simplefilter("ignore")
        return _report(asked)


def _report(asked: argparse.Namespace) -> int:
    gpu = find(asked.gpu) if asked.gpu else None
    name = models.REPOS.get(asked.model, asked.model)
    step = step_of(asked, name)
    remedies = Remedies(step, gpu or next(iter(GPUS.values())))
    plan = remedies.plan()
    if gpu is None:
        print(
            _json(name, step, plan) if asked.json else f"{_plan(name, step, plan)}\n{_gpus(plan)}"
        )
        return 0
    fit = plan.fits(gpu)
    time = time_of(step, plan, gpu, asked.examples, asked.price)
    if not asked.json:
        print(f"{_plan(name, step, plan)}\n{_fit(fit)}", flush=True)  # the rest takes seconds
        print("\n".join(_time(time, gpu)), flush=True)
        print(f"With room to spare PyTorch would report {plan.allocator_peaks(gpu)}.", flush=True)
    changes, largest = remedies.changes(), remedies.largest_batch()
    if asked.json:
        print(_json(name, step, plan, fit, changes, largest, time))
    else:
        print("\n".join(_what_fits(fit, changes, largest, step)))
        print("\n".join(f"Note: {note}" for note in notes(step, gpu)))
    return 0 if fit else 1


def time_of(
    step: ModelStep, plan: Plan, gpu: GPU, examples: int | None, price: float | None
) -> dict[str, Any]:
    """How long the step takes on a GPU, and what an epoch costs; the keys that JSON has, too.

    examples  of an epoch; None leaves out its hours
    price     of the GPU per hour; None leaves out the epoch's cost

    seconds, seconds_low, seconds_high  of a step, with the interval
    seconds_by_phase                    {phase: seconds}
    examples_per_second, tokens_per_second, mfu, epoch_hours, epoch_cost
    kernels_measured_on                 the GPU whose measured kernels stand for those of this one
    no_time                             why there are no seconds; then only this and "seconds", None
    Raises ValueError where an epoch was asked for and there are no seconds.
    """
    try:
        took = plan.seconds(gpu)
        tf32_missing = step.precision == "tf32" and not took.gpu.tf32
        mfu = took.mfu("fp32" if tf32_missing else step.precision)
    except ValueError as error:
        if examples is not None:
            raise
        return {"seconds": None, "no_time": str(error)}
    rate = step.batch_size / took.total
    facts = {
        "seconds": took.total,
        "seconds_low": took.low,
        "seconds_high": took.high,
        "seconds_by_phase": took.phases,
        "examples_per_second": rate,
        "tokens_per_second": rate * step.tokens if step.tokens else None,
        "mfu": mfu,
        "kernels_measured_on": took.gpu.like,
    }
    if examples is not None:
        hours = ceil(examples / step.batch_size) * took.total / 3600
        facts |= {"examples": examples, "epoch_hours": hours}
        if price is not None:
            facts |= {"price_per_hour": price, "epoch_cost": hours * price}
    return facts


def _time(time: Mapping[str, Any], gpu: GPU) -> list[str]:
    """The lines on time."""
    if time["seconds"] is None:
        return [f"The time of a step is not planned: {time['no_time']}"]
    took = f"A step takes {duration(time['seconds'])}"
    lines = [
        f"{took} ({duration(time['seconds_low'])} to {duration(time['seconds_high'])}): "
        + ", ".join(
            [f"{three_figures(time['examples_per_second'])} examples per second"]
            + [f"{three_figures(time['tokens_per_second'])} tokens per second"]
            * bool(time["tokens_per_second"])
            + [f"MFU {time['mfu']:.0%}"]
        )
        + "."
    ]
    if time["kernels_measured_on"] != gpu.name:
        lines.append(
            f"No kernels of the {gpu.name} were measured: those of the "
            f"{time['kernels_measured_on']} stand for them."
        )
    if "epoch_hours" in time:
        cost = ""
        if "epoch_cost" in time:
            cost = f" and costs {time['epoch_cost']:,.2f} at {time['price_per_hour']:g} per hour"
        hours = f"{three_figures(time['epoch_hours'])} hours"
        lines.append(f"An epoch of {time['examples']:,} examples takes {hours}{cost}.")
    return lines


def three_figures(count: float) -> str:
    """A number in three figures or all its whole ones: 0.0123, 4.56, 12,345."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def step_of(asked: argparse.Namespace, model: str) -> ModelStep:
    """The step that the options describe: each option is named as the field that it sets."""
    values = vars(asked)
    given = {field.name: values[field.name] for field in fields(ModelStep) if field.name in values}
    return ModelStep(hf_config.read(model), **given)


def notes(step: ModelStep, gpu: GPU | None) -> list[str]:
    """What to know about the plan of a step, one sentence each."""
    sentences = []
    if gpu and step.precision == "bf16" and not gpu.bf16:
        sentences.append(
            f"the {gpu.name} has no bf16 arithmetic and only emulates it, without a fused "
            "attention kernel: where a model has one, bf16 takes more there than planned. "
            "Use fp16."
        )
    if gpu and step.optimizer.startswith(("adamw8bit", "lion")) and gpu.capability < (6, 0):
        sentences.append("bitsandbytes asks for compute capability 6.0.")
    if step.reads == "image":
        sentences.append(
            "convolutions also take a workspace that cuDNN chooses when it runs; no plan knows it."
        )
    if "mamba" in step.config.model_type:
        sentences.append(
            "planned without the fused kernels of mamba_ssm, with which it takes less."
        )
    if step.reads != "image":
        sentences.append(
            f"examples are full, {step.tokens} tokens each; a batch with padding adds a mask in "
            "decoders."
        )
    return sentences


def _plan(name: str, step: ModelStep, plan: Plan) -> str:
    """The model, the step, and the peak by category."""
    if step.tokens:
        shape = f"{step.tokens} tokens"
    else:
        shape = " × ".join(map(str, hf_config.image_shape(step.config, step.side))) + " pixels"
    settings = [f"{step.batch_size} examples of {shape}", step.precision, step.optimizer]
    if step.accumulation > 1:
        settings.append(f"{step.accumulation} micro-batches")
    if step.checkpointing:
        settings.append("checkpointing")
    if step.lora_rank is not None:
        settings.append(f"LoRA rank {step.lora_rank}")
    if step.frozen is not None:
        settings.append(f"embeddings and {step.frozen} layers frozen")
    lines = [
        f"{name}: {_class_name(step)}, {number(plan.parameters)} parameters",
        ", ".join(settings),
        "",
        f"peak of the tensors, in the {plan.peak_phase} phase: {size(plan.peak)}",
    ]
    return "\n".join(lines + [_line(category, count) for category, count in plan.at_peak.items()])


def _line(name: str, count: int) -> str:
    return f"  {name:20} {size(count):>12}"


def _class_name(step: ModelStep) -> str:
    kind = hf_config.class_of(step.config, step.task) if step.task else None
    assert kind is not None, "checked when the step was made"
    return kind.__name__


def _fit(fit: Fit) -> str:
    """The terms that decide whether it fits, and whether it does."""
    verdict = "YES, it fits" if fit else "NO, it does not fit"
    lines = ["", f"on a {fit.gpu.name}"]
    lines += [_line(term, count) for term, count in fit.terms.items()]
    lines += [
        _line("needed", fit.need),
        _line("the GPU has", fit.gpu.memory),
        "",
        f"{verdict}: {size(abs(fit.over))} {'to spare' if fit else 'too much'}.",
    ]
    return "\n".join(lines)


def _gpus(plan: Plan) -> str:
    names = [gpu.name for gpu in GPUS.values() if plan.fits(gpu)]
    if not names:
        return "\nNo GPU of the list holds it (--list-gpus)."
    return f"\nGPUs that hold it: {', '.join(names)}."


def _what_fits(fit: Fit, changes: list[Change], largest: int | None, step: ModelStep) -> list[str]:
    lines = []
    if changes:
        alone = len(changes) > 1 or len(changes[0]) == 1
        lines.append(
            "What would fit, each change alone:"
            if alone
            else "What would fit, no change alone, but together:"
        )
        lines += ["  " + " ".join(_option(*pair) for pair in change.items()) for change in changes]
    elif not fit:
        lines.append(
            "No technique planned here makes it fit: "
            "take a smaller model, shorter examples or a larger GPU."
        )
    parts = f" ({step.accumulation} micro-batches)" if step.accumulation > 1 else ""
    lines.append(
        f"Largest batch that fits as asked{parts}: {largest}"
        if largest
        else "As asked, not even one example per micro-batch fits."
    )
    return lines


def _option(name: str, value: object) -> str:
    """A changed field as it is typed."""
    option = "--" + name.replace("_", "-")
    return option if value is True else f"{option} {value}"


def _json(
    name: str,
    step: ModelStep,
    plan: Plan,
    fit: Fit | None = None,
    changes: list[Change] | None = None,
    largest: int | None = None,
    time: Mapping[str, Any] | None = None,
) -> str:
    """Everything as one JSON object; sizes in bytes, times in seconds."""
    facts: dict[str, Any] = {
        "model": name,
        "class": _class_name(step),
        "task": step.task,
        "parameters": plan.parameters,
        "batch_size": step.batch_size,
        "length": step.tokens,
        "precision": step.precision,
        "optimizer": step.optimizer,
        "checkpointing": step.checkpointing,
        "accumulation": step.accumulation,
        "lora_rank": step.lora_rank,
        "frozen": step.frozen,
        "peak": plan.peak,
        "peak_phase": plan.peak_phase,
        "at_peak": plan.at_peak,
        "flops": plan.flops,
    }
    if fit is None:
        facts["cards"] = {gpu.name: bool(plan.fits(gpu)) for gpu in GPUS.values()}
        facts["notes"] = notes(step, None)
    else:
        facts |= vars(plan.allocator_peaks(fit.gpu))
        facts |= {
            "card": fit.gpu.name,
            "card_memory": fit.gpu.memory,
            "terms": fit.terms,
            "need": fit.need,
            "fits": bool(fit),
            "would_fit": changes,
            "largest_batch": largest,
            "notes": notes(step, fit.gpu),
            **(time or {}),
        }
    return json.dumps(facts, indent=1)
