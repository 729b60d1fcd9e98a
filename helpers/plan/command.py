"""The command `python -m helpers.plan`: does this training step fit that GPU?

    python -m helpers.plan --model microsoft/deberta-v3-large --gpu T4 --batch 16 --length 512

Exit status: 0 it fits (or no GPU was named), 1 it does not, 2 the question cannot be answered (one
sentence says why).

This module imports neither PyTorch nor transformers, so that the help and a misspelt option are
answered at once. The work is done by `helpers.plan.report`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import inf, nan

from helpers.gpus import GPUS
from helpers.units import GIB
from helpers.values import OPTIMIZERS, PRECISIONS

# The keys of `hf_config.TASKS`, which a test compares: that module imports transformers.
TASKS = (
    "sequence-classification",
    "token-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "image-classification",
)


def parser() -> argparse.ArgumentParser:
    """The options. Those of the step have the names of the fields of `ModelStep` as `dest`."""
    options = argparse.ArgumentParser(
        prog="python -m helpers.plan",
        description="Plan the memory and the time of one training step of a Hugging Face model "
        "from its configuration: what it takes on a GPU, by category, whether a GPU holds it, and "
        "how long it takes there. Reads no weights and needs no GPU.",
    )
    add = options.add_argument
    add("--model", help="a name on the hub, a folder, or a config.json")
    add("--gpu", "--card", help="the GPU (--list-gpus); without it: every GPU that holds the step")
    add("--json", action="store_true", help="print one JSON object")
    add("--list-gpus", "--list-cards", action="store_true", help="print the GPUs that are known")
    add(
        "--examples",
        metavar="N",
        type=_examples,
        help="examples of an epoch, to print its hours on --gpu",
    )
    add(
        "--price",
        metavar="P",
        type=_price,
        help="price of the GPU per hour, in any currency, to print that of the epoch of --examples",
    )
    add = options.add_argument_group("the step").add_argument
    add(
        "--batch",
        dest="batch_size",
        metavar="N",
        type=int,
        default=16,
        help="examples per optimizer step (16)",
    )
    add(
        "--length",
        metavar="N",
        type=int,
        help="tokens per example (512, or fewer where the model takes fewer)",
    )
    add(
        "--image-size",
        dest="side",
        metavar="N",
        type=int,
        help="height and width of an image in pixels (the configuration's, or 224)",
    )
    add("--precision", choices=PRECISIONS, default="fp32")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    add(
        "--accumulation",
        metavar="N",
        type=int,
        default=1,
        help="micro-batches per optimizer step (1)",
    )
    add(
        "--lora-rank",
        metavar="R",
        type=int,
        help="train adapters of this rank beside query and value projections, and a new head",
    )
    add("--frozen", metavar="N", type=int, help="freeze the embeddings and the first N layers")
    add(
        "--task",
        choices=TASKS,
        help="what to train for (what the configuration names, or the usual one of its kind)",
    )
    add(
        "--classes",
        metavar="N",
        type=int,
        help="classes of a classifier (the configuration's, or 2)",
    )
    return options


def _examples(typed: str) -> int:
    try:
        count = int(typed)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{typed} must be a whole number of at least 1.")
    return count


def _price(typed: str) -> float:
    try:
        price = float(typed)
    except ValueError:
        price = nan
    if not 0 <= price < inf:
        raise argparse.ArgumentTypeError(f"{typed} must be a number of at least 0.")
    return price


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; argparse itself exits with 2."""
    options = parser()
    asked = options.parse_args(arguments)
    if asked.list_gpus:
        for gpu in GPUS.values():
            print(f"{gpu.name:16} {gpu.memory / GIB:6.2f} GiB{'' if gpu.bf16 else '   no bf16'}")
        return 0
    if not asked.model:
        options.error("--model is needed: a name on the hub, a folder, or a config.json.")
    if asked.examples is not None and not asked.gpu:
        options.error("--examples asks for hours, which depend on the GPU: name one with --gpu.")
    if asked.price is not None and asked.examples is None:
        options.error("--price asks for the price of an epoch: say with --examples how long it is.")
    from helpers.plan.report import report  # takes seconds

    try:
        return report(asked)
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        options.error(" ".join(str(error).split()))


if __name__ == "__main__":
    sys.exit(main())
