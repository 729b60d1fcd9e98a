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
        description="Plan the memory of one training step of a Hugging Face model from its "
        "configuration: what it takes on a GPU, by category, and whether a GPU holds it. "
        "Reads no weights and needs no GPU.",
    )
    add = options.add_argument
    add("--model", help="a name on the hub, a folder, or a config.json")
    add("--gpu", "--card", help="the GPU (--list-gpus); without it: every GPU that holds the step")
    add("--json", action="store_true", help="print one JSON object")
    add("--list-gpus", "--list-cards", action="store_true", help="print the GPUs that are known")
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
    from helpers.plan.report import report  # takes seconds

    try:
        return report(asked)
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        options.error(" ".join(str(error).split()))


if __name__ == "__main__":
    sys.exit(main())
