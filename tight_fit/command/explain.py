"""The command `tight-fit explain snapshot.pickle`: what was in memory, and what would have fitted.

Exit status: 0 where it was explained, 2 where the file is no memory snapshot (one sentence).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tight_fit.command.arguments import OneLineParser
from tight_fit.command.wrapper import sentence
from tight_fit.script.snapshot import Block, InUse, moment, read
from tight_fit.units import size

NAME = "tight-fit explain"
LINES = 8
# Category -> (what frees a part of it, the part).
FREES = {
    "activations": (
        ("half of the examples in a micro-batch (twice the gradient accumulation)", 1 / 2),
        ("mixed precision, where it is not on yet", 2 / 5),
    ),
    "optimizer states and temporaries": (("8-bit AdamW instead of AdamW", 3 / 4),),
    "weights": (("weights in bf16 instead of fp32", 1 / 2),),
}


def main(arguments: Sequence[str] | None = None, prog: str = NAME) -> int:
    """Run the command and return the exit status; argparse itself exits with 2."""
    options = OneLineParser(
        prog=prog,
        description="Explain PyTorch's memory snapshot of a GPU (torch.cuda.memory._dump_snapshot "
        "after _record_memory_history): what was in memory, by category and line of the program. "
        "The file is read as plain data, nothing in it is run.",
    )
    options.add_argument("snapshot", help="the file")
    asked = options.parse_args(arguments)
    try:
        found = moment(read(asked.snapshot))
    except (ValueError, OSError) as error:
        options.error(sentence(error))
    print("\n".join(lines(found)))
    return 0


def lines(found: InUse) -> list[str]:
    """The explanation."""
    text = []
    if found.asked:
        missing = max(0, found.asked - found.free)
        text.append(
            f"Out of memory: {size(found.asked)} more were asked for, and the GPU had "
            f"{size(found.free)} free."
        )
    else:
        missing = 0
        text.append("The recording has no out-of-memory: this is when most memory was in use.")
    text.append(
        f"In use: {size(found.allocated)}, in {len(found.blocks):,} tensors; the allocator held "
        f"{size(found.reserved)} at the end."
    )
    by_category: Counter[str] = Counter()
    for block in found.blocks:
        by_category[block.category] += block.bytes
    text += ["", "by what was running when it was allocated"]
    text += [f"  {name:34} {size(count):>12}" for name, count in by_category.most_common()]
    text += ["", "the lines that allocated most"]
    text += _by_line(found.blocks)
    if missing:
        text += ["", f"What would have freed the {size(missing)} that were missing, about:"]
        text += _remedies(by_category, missing)
    return text


def _by_line(blocks: Sequence[Block]) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for block in blocks:
        groups[block.line or "no line of a program", block.category].append(block.bytes)
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))[:LINES]
    return [
        f"  {size(sum(sizes)):>12}  {line}: {category}, {len(sizes):,} tensors, the largest "
        f"{size(max(sizes))}"
        for (line, category), sizes in ordered
    ]


def _remedies(by_category: Counter[str], missing: int) -> list[str]:
    """What frees enough, and what frees a part, largest first."""
    options = [
        (int(by_category[category] * part), words)
        for category, choices in FREES.items()
        for words, part in choices
        if by_category[category]
    ]
    return [
        f"  {size(freed):>12}  {words}" + ("" if freed >= missing else " (not enough alone)")
        for freed, words in sorted(options, reverse=True)
    ] or ["  nothing that is known of: the snapshot does not say what the memory was for"]
