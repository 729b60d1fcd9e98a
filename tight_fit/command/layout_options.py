"""The options of the command that are about several GPUs."""

from __future__ import annotations

from collections.abc import Callable

from tight_fit.command.arguments import whole_number
from tight_fit.layouts.layout import WRAPPINGS
from tight_fit.layouts.schedules import SCHEDULES

MOST = 10**6  # of counts that nobody exceeds
# The options that say something about a layout, and nothing without one.
OF_LAYOUTS = "inside between cards recompute no_reshard wrap prefetch reduce schedule".split()


def add_layout(add: Callable[..., object]) -> None:
    """Add them to a group of a parser."""
    add(
        "--layout",
        metavar="AXES",
        help="lay the step over several GPUs: ddp=8, zero1=8, zero2=8, fsdp=8 or hsdp=2x4 "
        "(replicas x shards), with tensor=2 or context=2 beside FSDP2, with expert=4, by which the "
        "data ranks of fsdp=8 divide the experts of each layer, and pipeline=4 alone or beside "
        "ddp, fsdp or hsdp; --batch counts the examples of all",
    )
    add(
        "--gpus",
        metavar="N",
        type=whole_number(1, MOST),
        help="GPUs in all; without --layout: search the fastest layout of so many that fits",
    )
    add("--machines", metavar="N", type=whole_number(1, MOST), help="machines that hold them (1)")
    add("--inside", metavar="LINK", help="link between GPUs of a machine, such as 'NVLink 4'")
    add("--between", metavar="LINK", help="network, such as 'InfiniBand 400 Gbit'")
    add(
        "--cards",
        metavar="N",
        type=whole_number(1, MOST),
        help="network cards per machine",
    )
    add(
        "--recompute",
        choices=("full", "selective"),
        help="recompute whole layers (as --checkpointing), or all but attention and every second "
        "product",
    )
    add("--no-reshard", action="store_true", help="keep weights gathered until the backward pass")
    add(
        "--wrap",
        choices=WRAPPINGS,
        help="groups of FSDP2 (layers)",
    )
    add(
        "--prefetch",
        metavar="N",
        type=whole_number(0, MOST),
        help="layers gathered ahead of time in the forward pass (0)",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        help="of a pipeline's micro-batches, which --accumulation counts (1f1b)",
    )
    add(
        "--reduce",
        choices=("fp32", "bf16"),
        help="dtype in which FSDP2 sums gradients (fp32)",
    )
