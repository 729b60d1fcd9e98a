"""The command `tight-fit`, which is also `python -m tight_fit`: does this step fit that GPU?

    tight-fit roberta-base --gpu 8GB --batch 8

Exit status: 0 it fits (or no GPU was named), 1 it does not, 2 the question cannot be answered (one
sentence says why).

Nothing is imported here that takes time, so that the help, a misspelt option and an answer that is
kept come at once. `tight_fit.command.answer` does the work, `tight_fit.command.report` writes it
down.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence

from tight_fit.checks import PRECISIONS
from tight_fit.command import kept, question, report
from tight_fit.command.arguments import OneLineParser, integer, price, whole_number
from tight_fit.command.layout_options import MOST, OF_LAYOUTS, add_layout
from tight_fit.command.progress import Progress
from tight_fit.command.question import Question
from tight_fit.command.wrapper import sentence
from tight_fit.gpus import KNOWN, calibration
from tight_fit.gpus.specs import no_speed, speed_of
from tight_fit.gpus.table import SPECS
from tight_fit.models.config import TASKS, WEIGHTS
from tight_fit.optimizer_kinds import ALSO, OPTIMIZERS
from tight_fit.techniques.references import REFERENCES
from tight_fit.techniques.rules import ATTENTIONS, BASES, OFFLOADS, SCALINGS
from tight_fit.units import GIB

NAME = "tight-fit"
EXAMPLES = """\
examples:
  tight-fit roberta-base --gpu 8GB --batch 8
  tight-fit microsoft/deberta-v3-large --gpu T4 --batch 16 --length 512 --precision fp16
  tight-fit meta-llama/Llama-3.1-8B --gpu "RTX 4090" --batch 1 --length 4096 --lora 16
  tight-fit Qwen/Qwen3-8B --gpu T4 --batch 1 --base nf4 --lora 16 --chunked-loss
  tight-fit Qwen/Qwen3-8B --gpu H100 --task dpo --batch 4 --lora 16 --chunked-loss
  tight-fit gpt2 --gpu A100 --examples 100000 --price 1.50
  tight-fit ./my-model/config.json --json
  tight-fit meta-llama/Llama-3.1-8B --gpu H100 --layout fsdp=8 --batch 16 --length 8192
  tight-fit meta-llama/Llama-3.1-8B --gpu H100 --gpus 64 --machines 8 --length 8192
  tight-fit script train.py --gpu T4 -- --batch_size 16   (a program of yours, unchanged)
  tight-fit calibrate   (measures the GPU at hand in a minute, for plans of its time)
"""


def parser(prog: str = NAME) -> argparse.ArgumentParser:
    """The options. Those of the step have the names of the fields of `ModelStep` as `dest`."""
    options = OneLineParser(
        prog=prog,
        description="Plan the memory and the time of one training step of a Hugging Face model "
        "from its configuration: whether a GPU holds it, what would make it fit, where the bytes "
        "go, and how long it takes. Reads no weights and needs no GPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("name", nargs="?", metavar="MODEL", help="a name on the hub, a folder, or a config.json")
    add("--model", metavar="MODEL", help="the same")
    add(
        "--gpu",
        "--card",
        help="the GPU by name in any spelling (--list-gpus), or its size, such as 8GB; without it: "
        "every GPU that holds the step",
    )
    add("--quick", action="store_true", help="only whether it fits, not what would")
    add("--fresh", action="store_true", help="plan anew, and take no answer that is kept")
    add("--json", action="store_true", help="print one JSON object")
    add(
        "--fastest",
        action="store_true",
        help="also search for the fastest combination of techniques that fits --gpu",
    )
    add(
        "--calibration",
        metavar="FILE",
        help="what tight-fit calibrate measured, in place of the file in the usual place; none "
        "plans by the table alone",
    )
    add("--list-gpus", "--list-cards", action="store_true", help="print the GPUs that are known")
    add(
        "--examples",
        metavar="N",
        type=whole_number(1, 10**15),
        help="examples of an epoch, to print its hours on --gpu",
    )
    add(
        "--price",
        metavar="P",
        type=price,
        help="price of the GPU per hour, in any currency, to print that of the epoch of --examples",
    )
    _add_step(options.add_argument_group("the step").add_argument)
    add_layout(options.add_argument_group("several GPUs").add_argument)
    return options


def _add_step(add: Callable[..., object]) -> None:
    add(
        "--batch",
        "--batch-size",
        dest="batch_size",
        metavar="N",
        type=integer,
        help=f"examples per optimizer step ({question.BATCH})",
    )
    add(
        "--length",
        metavar="N",
        type=integer,
        help="tokens per example (512, or fewer where the model takes fewer)",
    )
    add(
        "--image-size",
        dest="side",
        metavar="N",
        type=whole_number(1, MOST),
        help="height and width of an image in pixels (the configuration's, or 224)",
    )
    add(
        "--weights",
        choices=WEIGHTS,
        help="dtype of the weights (the configuration's); adapters of LoRA are fp32",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        help="bf16 and fp16 are autocast, fp32 is none (the dtype of the weights)",
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        type=lambda typed: ALSO.get(typed, typed),
        help="adamw where nothing is said, which is fused; adamw_foreach is PyTorch's AdamW as it "
        "comes; the names of Trainer's optim do too",
    )
    add("--compile", action="store_true", help="compile each layer by itself (layer.compile())")
    add("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    add(
        "--optimizer-in-backward",
        action="store_true",
        help="update each weight as soon as its gradient is there, without clipping",
    )
    add(
        "--offload",
        choices=OFFLOADS,
        help="what waits in the host's memory: the optimizer's states, or activations",
    )
    add(
        "--float8",
        choices=SCALINGS,
        help="the linear layers' products in 8 bits, as torchao's float8 training has them, scaled "
        "by tensor or by row (GPUs from Ada on)",
    )
    add("--accumulation", metavar="N", type=integer, help="micro-batches per optimizer step (1)")
    _add_adapters(add)
    add(
        "--attention",
        choices=ATTENTIONS,
        help="eager keeps the square of the length, sdpa does not (what the library takes itself)",
    )
    add(
        "--chunked-loss",
        dest="loss",
        action="store_const",
        const="chunked",
        help="the loss of a language model a chunk of tokens at a time, without all its logits",
    )
    add("--frozen", metavar="N", type=integer, help="freeze the embeddings and the first N layers")
    add(
        "--task",
        choices=TASKS,
        help="what to train for (what the configuration names, or the usual one of its kind); with "
        "dpo --batch counts pairs, with grpo completions",
    )
    add(
        "--reference",
        choices=REFERENCES,
        help="with --task dpo and grpo: how the model before the training is had (adapters-off "
        "with --lora, else a model in memory; with grpo none)",
    )
    add(
        "--completion",
        metavar="N",
        type=whole_number(1, MOST),
        help="with --task grpo: tokens of --length that the model writes (half)",
    )
    add(
        "--classes",
        metavar="N",
        type=whole_number(1, MOST),
        help="classes of a classifier (the configuration's, or 2)",
    )


def _add_adapters(add: Callable[..., object]) -> None:
    add(
        "--lora",
        "--lora-rank",
        dest="lora_rank",
        metavar="R",
        type=whole_number(1, MOST),
        help="train adapters of this rank, and a new head, instead of the weights",
    )
    add(
        "--targets",
        dest="lora_targets",
        metavar="T",
        help="layers with adapters: query-value (which is what is taken), all-linear, or names "
        "such as q_proj,v_proj",
    )
    add("--lora-alpha", metavar="A", type=float, help="scale of the adapters, α (2 R)")
    add(
        "--rslora",
        dest="lora_scale",
        action="store_const",
        const="alpha/sqrt(r)",
        help="divide α by the root of the rank",
    )
    add(
        "--base",
        choices=BASES,
        help="the frozen weights: nf4 is 4 bits with double quantization (QLoRA), with --weights "
        "for what is not quantized; fp32 and bf16 are --weights",
    )
    add(
        "--kbit",
        action="store_true",
        help="with --base nf4: after peft's prepare_model_for_kbit_training (norms, embeddings and "
        "head in fp32, checkpointing)",
    )


def main(
    arguments: Sequence[str] | None,
    prog: str,
    layouts: Callable[[Question, argparse.Namespace], int],
) -> int:
    """Run the command and return the exit status; argparse itself exits with 2.

    layouts  answers a question with --layout or --gpus (`tight_fit.command.main`)
    """
    options = parser(prog)
    asked = options.parse_args(arguments)
    if asked.list_gpus:
        if asked.name or asked.model:
            options.error("--list-gpus lists the GPUs and plans no model: ask for one of the two.")
        for gpu in KNOWN.values():
            lacks = "no bf16" if not gpu.bf16 else "no time" if gpu.name not in SPECS else ""
            print(f"{gpu.name:19} {gpu.memory / GIB:6.2f} GiB   {lacks}".rstrip())
        return 0
    if asked.name and asked.model:
        options.error("the model is named twice, as MODEL and with --model: name one.")
    if not (asked.model or asked.name):
        options.error("a model is needed: a name on the hub, a folder, or a config.json.")
    if asked.fastest and not asked.gpu:
        options.error("--fastest asks what fits and how fast it is: name the GPU with --gpu.")
    if asked.examples is not None and not asked.gpu:
        options.error("--examples asks for hours, which depend on the GPU: name one with --gpu.")
    if asked.price is not None and asked.examples is None:
        options.error("--price asks for the price of an epoch: say with --examples how long it is.")
    _check_layout(asked, options)
    try:
        with calibration.chosen(asked.calibration):
            wanted = question.of(asked)
            if asked.layout or asked.gpus or asked.machines:
                return layouts(wanted, asked)
            if asked.fastest and wanted.gpu and speed_of(wanted.gpu.name) is None:
                options.error(f"--fastest compares times, and {no_speed(wanted.gpu)}")
            return _answer(wanted, asked)
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in question.LIBRARIES:
            options.error(
                f"no answer to this comes with the package, and a new plan needs {error.name}: "
                "pip install -r requirements.txt."
            )
        options.error(sentence(error))


def _given(value: object) -> bool:
    return value is not None and value is not False


def _check_layout(asked: argparse.Namespace, options: argparse.ArgumentParser) -> None:
    """Refuse what would be passed over in silence, with a layout and without one."""
    for name in ("gpu", "layout"):
        if getattr(asked, name) is not None and not getattr(asked, name).strip():
            options.error(f"--{name} is empty: leave it out, or write what it names.")
    if asked.layout is None and asked.gpus is None and asked.machines is None:
        given = [name for name in OF_LAYOUTS if _given(getattr(asked, name))]
        if given:
            options.error(
                f"--{given[0].replace('_', '-')} is about several GPUs: give their layout with "
                "--layout, as fsdp=8, or their number with --gpus, or leave it out."
            )
        return
    if asked.checkpointing and asked.recompute == "selective":
        options.error(
            "--checkpointing recomputes whole layers, and --recompute selective less: give one."
        )
    for name in ("fastest", "examples", "price"):
        if _given(getattr(asked, name)):
            options.error(
                f"--{name} is answered for one GPU only: leave it out with --layout and --gpus."
            )


def _answer(asked: Question, options: argparse.Namespace) -> int:
    """Print the answer to a question, a kept one where there is one; the exit status."""
    facts = None if options.fresh or options.fastest else kept.find(asked)
    progress = Progress()
    answers: Iterable[kept.Facts] = (
        [facts] if facts else _new(asked, progress, options.fastest, options.fresh)
    )
    said: list[str] = []
    for facts in answers:
        facts = report.with_epoch(facts, options.examples, options.price)
        facts["assumed"] = asked.assumed(facts)
        if options.json:
            continue
        lines = [] if said else report.verdict(facts, asked.others)
        if "would_fit" in facts and not asked.quick:
            lines += report.advice(facts)
            lines += facts.get("fastest_lines", [])
        progress.clear()
        print("\n".join(lines), flush=True)
        said += lines
    assert facts is not None, "there is at least one answer, or an exception"
    progress.clear()
    if options.json:
        facts.pop("fastest_lines", None)  # the text of "fastest"
        print(json.dumps(facts, indent=1))
    else:
        print("\n".join(report.details(facts)))
    return 0 if facts.get("fits", True) else 1


def _new(asked: Question, progress: Progress, search: bool, fresh: bool) -> Iterable[kept.Facts]:
    """Answers that are made now, and kept."""
    from tight_fit.command.answer import answers  # imports NumPy

    for facts in answers(asked, progress.say, search, fresh):
        yield facts
    if not search:
        kept.keep(asked, facts)
