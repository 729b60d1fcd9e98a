"""The command `python -m helpers.plan`: will this step fit that card?

    python -m helpers.plan --model microsoft/deberta-v3-large --gpu T4 --batch 16 --length 512

Exit status: 0 it fits (or no card was named), 1 it does not, 2 the question cannot be answered (one sentence says why).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence

from helpers import models
from helpers.gpus import GPU, GPUS, find
from helpers.memory.timeline import Fit, Plan
from helpers.plan import hf_config
from helpers.plan.hf_config import TASKS
from helpers.plan.hf_model import ModelStep
from helpers.plan.remedies import Remedies
from helpers.units import GIB, number, size
from helpers.values import OPTIMIZERS, PRECISIONS


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m helpers.plan",
        description="Plan one training step of a Hugging Face model from its configuration: "
        "what it takes on a GPU, by category, and whether a card holds it. Reads no weights, needs no GPU.",
    )
    add = made.add_argument
    add("--model", help="a name on the hub, a folder, or a config.json")
    add("--gpu", "--card", help="the GPU (--list-gpus); without it: every GPU that holds the step")
    add("--batch", type=int, default=16, help="rows an optimizer step (16)")
    add("--length", type=int, help="tokens a row (512, or fewer where the model takes fewer)")
    add("--image-size", type=int, help="pixels of a side (the configuration's, or 224)")
    add("--precision", choices=PRECISIONS, default="fp32")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--accumulation", type=int, default=1, help="micro-batches an optimizer step (1)")
    add(
        "--lora-rank",
        type=int,
        help="train adapters of this rank beside query and value projections, and a new head",
    )
    add("--frozen", type=int, metavar="N", help="freeze the embeddings and the first N layers")
    add(
        "--task",
        choices=TASKS,
        help="what to train for (what the configuration names, or the usual one of its kind)",
    )
    add("--classes", type=int, help="of a classifier (the configuration's, or 2)")
    add("--json", action="store_true", help="print one JSON object")
    add("--list-gpus", "--list-cards", action="store_true", help="print the cards that are known")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (argparse itself exits with 2)."""
    command = parser()
    asked = command.parse_args(arguments)
    if asked.list_gpus:
        for gpu in GPUS.values():
            print(f"{gpu.name:16} {gpu.memory / GIB:6.2f} GiB{'' if gpu.bf16 else '   no bf16'}")
        return 0
    if not asked.model:
        command.error("--model is needed: a name on the hub, a folder, or a config.json.")
    logging.getLogger("torch").setLevel(
        logging.CRITICAL
    )  # torch's own account of what ends in our one sentence
    try:
        with warnings.catch_warnings(), models.quiet():
            warnings.simplefilter("ignore")
            return answer(asked)
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        command.error(" ".join(str(error).split()))


def answer(asked: argparse.Namespace) -> int:
    """Print what was asked; returns the exit status. Raises what `strangers.plan_model` and `cards.find` raise."""
    gpu = find(asked.gpu) if asked.gpu else None
    name = models.REPOS.get(asked.model, asked.model)
    model_step = ModelStep(
        hf_config.read(name),
        batch_size=asked.batch,
        length=asked.length,
        precision=asked.precision,
        optimizer=asked.optimizer,
        checkpointing=asked.checkpointing,
        accumulation=asked.accumulation,
        frozen=asked.frozen,
        lora_rank=asked.lora_rank,
        task=asked.task,
        classes=asked.classes,
        side=asked.image_size,
    )
    fitting = Remedies(model_step, gpu or next(iter(GPUS.values())))
    plan = fitting.plan()
    fit = plan.fits(gpu) if gpu else None
    if not asked.json:
        print(_plan(name, plan), flush=True)  # the rest takes some more seconds
        print(_fit(fit) if gpu else _cards(plan), flush=True)
        if gpu and plan.target == "cuda":
            print(
                f"With room to spare PyTorch would report {plan.allocator_peaks(gpu)}.", flush=True
            )
    remedies = fitting.remedies() if gpu else []
    largest = fitting.largest_batch() if gpu else None
    if asked.json:
        print(json.dumps(_facts(name, plan, fit, remedies, largest), indent=1))
    elif gpu:
        print("\n".join(_what_fits(fit, remedies, largest, model_step)))
        print("\n".join(f"Note: {note}" for note in notes(plan, gpu)))
    return 0 if fit is None or fit else 1


def notes(plan: Plan, gpu: GPU | None) -> list[str]:
    """What to know about this plan, a sentence each."""
    asked, kind, found = plan.recipe, plan.recipe.config.model_type, []
    if gpu and asked.precision == "bf16" and not gpu.bf16:
        found.append(
            f"the {gpu.name} has no bf16 arithmetic and only emulates it, without a fused attention kernel: where a model "
            "has one, bf16 takes more there than planned. Use fp16."
        )
    if gpu and asked.optimizer.startswith(("adamw8bit", "lion")) and gpu.capability < (6, 0):
        found.append("bitsandbytes asks for compute capability 6.0.")
    if asked.reads == "image":
        found.append(
            "convolutions also take a workspace that cuDNN chooses when it runs; no plan knows it."
        )
    if "mamba" in kind:
        found.append("planned without the fused kernels of mamba_ssm, with which it takes less.")
    if asked.reads != "image":
        found.append(
            f"rows are full, {asked.tokens} tokens each; a batch with padding adds a mask in decoders."
        )
    return found


def _plan(name: str, plan: Plan) -> str:
    asked = plan.recipe
    kind = hf_config.class_of(asked.config, asked.task).__name__
    shape = (
        f"{asked.tokens} tokens"
        if asked.tokens
        else " × ".join(map(str, hf_config.image_shape(asked.config, asked.side))) + " pixels"
    )
    also = [f"{asked.accumulation} micro-batches"] * (asked.accumulation > 1) + [
        "checkpointing"
    ] * asked.checkpointing
    also += [f"LoRA rank {asked.lora_rank}"] * (asked.lora_rank is not None)
    also += [f"embeddings and {asked.frozen} layers frozen"] * (asked.frozen is not None)
    lines = [
        f"{name}: {kind}, {number(plan.parameters)} parameters",
        ", ".join([f"{asked.batch_size} rows of {shape}", asked.precision, asked.optimizer, *also]),
        "",
        f"peak of the tensors, in the {plan.peak_phase} phase: {size(plan.peak)}",
    ]
    lines += [f"  {category:20} {size(count):>12}" for category, count in plan.at_peak.items()]
    return "\n".join(lines)


def _fit(fit: Fit) -> str:
    lines = ["", f"on a {fit.gpu.name}"]
    lines += [f"  {term:20} {size(count):>12}" for term, count in fit.terms.items()]
    lines += [
        f"  {'needed':20} {size(fit.need):>12}",
        f"  {'the card has':20} {size(fit.gpu.memory):>12}",
        "",
        f"{'YES, it fits' if fit else 'NO, it does not fit'}: {size(abs(fit.over))} {'to spare' if fit else 'too much'}.",
    ]
    return "\n".join(lines)


def _cards(plan: Plan) -> str:
    held = [gpu.name for gpu in GPUS.values() if plan.fits(gpu)]
    return "\n" + (
        f"Cards that hold it: {', '.join(held)}."
        if held
        else "No card of the list holds it (--list-cards)."
    )


def _what_fits(
    fit: Fit, remedies: list[dict], largest: int | None, model_step: ModelStep
) -> list[str]:
    lines = []
    if remedies:
        one = len(remedies) > 1 or len(remedies[0]) == 1
        lines.append(
            "What would fit, each change alone:"
            if one
            else "What would fit, no change alone, but together:"
        )
        lines += ["  " + " ".join(_option(*pair) for pair in change.items()) for change in remedies]
    elif not fit:
        lines.append(
            "No technique planned here makes it fit: take a smaller model, shorter rows or a larger card."
        )
    parts = f" ({model_step.accumulation} micro-batches)" if model_step.accumulation > 1 else ""
    lines.append(
        f"Largest batch that fits as asked{parts}: {largest}"
        if largest
        else "As asked, not even one row a micro-batch fits."
    )
    return lines


def _option(name: str, value) -> str:
    option = "--" + name.replace("_", "-")
    return option if value is True else f"{option} {value}"


def _facts(
    name: str, plan: Plan, fit: Fit | None, remedies: list[dict], largest: int | None
) -> dict:
    """Everything in bytes."""
    asked = plan.recipe
    found = {
        "model": name,
        "class": hf_config.class_of(asked.config, asked.task).__name__,
        "task": asked.task,
        "parameters": plan.parameters,
        "batch_size": asked.batch_size,
        "length": asked.tokens,
        "precision": asked.precision,
        "optimizer": asked.optimizer,
        "checkpointing": asked.checkpointing,
        "accumulation": asked.accumulation,
        "lora_rank": asked.lora_rank,
        "frozen": asked.frozen,
        "peak": plan.peak,
        "peak_phase": plan.peak_phase,
        "at_peak": plan.at_peak,
        "flops": plan.flops,
    }
    if fit is None:
        return found | {
            "cards": {gpu.name: bool(plan.fits(gpu)) for gpu in GPUS.values()},
            "notes": notes(plan, None),
        }
    if plan.target == "cuda":
        found |= vars(plan.allocator_peaks(fit.gpu))
    return found | {
        "card": fit.gpu.name,
        "card_memory": fit.gpu.memory,
        "terms": fit.terms,
        "need": fit.need,
        "fits": bool(fit),
        "would_fit": remedies,
        "largest_batch": largest,
        "notes": notes(plan, fit.gpu),
    }


if __name__ == "__main__":
    sys.exit(main())
