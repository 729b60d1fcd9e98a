"""Lines through traces of well-known models, kept with the package: `python -m
tight_fit.command.ship_traces`.

With them the command answers a first question about such a model without PyTorch, whatever its
batch size, GPU and, within bounds, length. `command.shipped_steps` says of which steps. Lines with
further axes give other numbers of classes and ranks of adapters (`with_axes`). A loss in chunks has
a line where these are alike; offloaded activations have one where all are large enough to be
offloaded.

Nothing here notices that the planner itself has changed: `tests/command/test_shipped_traces.py`
traces a sample anew and compares. Where they differ, ship them `--again`.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from tight_fit.command import question
from tight_fit.command.answer import quietly, step_of, trainer_optimizer
from tight_fit.command.arguments import OneLineParser
from tight_fit.command.kept_traces import PART, ShippedLines
from tight_fit.command.ship import asked_of
from tight_fit.command.shipped_steps import steps_of, with_optimizers
from tight_fit.command.wrapper import run
from tight_fit.models import config as hf_config
from tight_fit.models import names as model_names
from tight_fit.models.step import ModelStep
from tight_fit.plans import chunk_lines
from tight_fit.plans.batch_line import general
from tight_fit.plans.other_optimizer import optimizer_part, plain, with_adamw
from tight_fit.plans.trace_line import (
    FIRST,
    MANY,
    MOST,
    Place,
    TraceLine,
    equal,
    extended,
    fitted,
    grid,
)
from tight_fit.search.remedies import RANK

FURTHER: list[Place] = [(5, 200), (3, 333)]  # where a line is checked, beside its longest length
LARGE: list[Place] = [(48, 176), (50, 333)]  # the same of a line of offloaded activations
# Of each further axis what is added to its value for the traces that give it, and its largest
# value, at which it is checked: of both the first that holds. Beyond some rank the optimizer issues
# more kernels, as each takes a limited number of elements.
BESIDE = {"classes": ((1,), (1000,)), "lora_rank": ((4, 8), (256, 64, 32))}
ODD = {"classes": 7, "lora_rank": 4}  # checked as well, or the next value where no step leads there
LONGEST = (4096, 2048, 1024, 512)  # tokens up to which a line is taken, the first that holds


def ship(names: Iterable[str], few: bool = False, more: bool = False, again: bool = False) -> None:
    """Trace the steps of models and write the files that `kept_traces.ShippedLines` reads.

    few    only each model's step as it is
    more   what is there stays, and only what is missing is traced
    again  what is there is traced anew, and nothing else
    """
    from tight_fit.plans.model import trace_model_step  # imports PyTorch

    def trace(step: ModelStep) -> Any:
        with quietly():
            return trace_model_step(step, "cuda")

    for name in map(model_names.full_name, names):
        asked = asked_of(name)
        config = hf_config.from_values(asked.values, name)
        facts = {"config": hf_config.remember(config).facts, "trainer": trainer_optimizer()}
        head = {"model": name, "versions": question.versions(), "facts": facts}
        known = ShippedLines.of(asked.values) if more else ShippedLines({}, {})
        lines = {key: line for key in known.lines if (line := known.line(key)) is not None}
        parts = {
            key: part
            for key in (name.removeprefix(PART) for name in known.lines)
            if (part := known.part(key)) is not None
        }
        wanted = ShippedLines.of(asked.values, stale=True).lines if again else None
        try:
            _trace_all(step_of(asked), few, trace, lines, parts, wanted)
        finally:  # what was traced before an interruption is kept; `more` goes on from there
            print(f"{name}: {len(lines)} lines, {len(parts)} parts", file=sys.stderr, flush=True)
            if lines:
                ShippedLines.write(asked.values, head, lines, parts)


def _trace_all(
    step: ModelStep,
    few: bool,
    trace: Any,
    lines: dict[str, TraceLine],
    parts: dict[str, Any],
    wanted: Container[str] | None = None,
) -> None:
    """Add lines and parts of a step that are not there yet.

    wanted  the keys of those that are taken, None for all
    """
    for changed in [step] if few else steps_of(step):
        key = question.digest(general(changed, "cuda"))
        if wanted is not None and key not in wanted:
            continue
        line = lines.get(key) or line_of(changed, trace)
        if line is not None:
            known = line.packed.get("axes", {})
            # With other values more activations may be large enough to be offloaded.
            none = few or changed.offload == "activations"
            axes = [] if none else [axis for axis in axes_of(changed) if axis[0] not in known]
            lines[key] = with_axes(line, changed, axes, trace)
    usual = cache(trace)  # with fused AdamW: the same beside each of the other optimizers
    for changed in [] if few else with_optimizers(step):
        parts |= part_of(changed, trace, parts, usual, wanted)


def part_of(
    step: ModelStep,
    trace: Any,
    parts: Container[str],
    usual: Any,
    wanted: Container[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """{key: the part of a step's optimizer}, empty where it is none by itself or is there.

    usual   traces the step with fused AdamW
    wanted  as for `_trace_all`
    """
    alone = plain(at(step, FIRST if step.tokens else (FIRST[0], None)))
    beside = with_adamw(alone) if alone else None
    if alone is None or beside is None:
        return {}
    key = question.digest(general(alone, "cuda"))
    if key in parts or wanted is not None and PART + key not in wanted:
        return {}
    try:
        part = optimizer_part(trace(alone), usual(beside))
    except (ValueError, ModuleNotFoundError):
        return {}
    return {key: part} if part else {}


def line_of(step: ModelStep, trace: Any) -> TraceLine | None:
    """The line of a step, through traces that `trace(step)` makes; None where there is none."""
    traces: dict[Place, Any] = {}
    first, further, smallest, chunks = FIRST[0], FURTHER, None, None
    if step.offload == "activations":
        from tight_fit.techniques.activation_offload import SMALLEST  # imports PyTorch

        first, further, smallest = MANY, LARGE, SMALLEST
    elif step.loss == "chunked":
        chunks = chunks_of(step)
        if chunks is None:
            return None
        first = 1 if step.micro_batch == 1 else chunk_lines.FEW
        further = in_chunks(first, *chunks)
    elif step.micro_batch == 1:
        first, further = 1, [(1, tokens) for _, tokens in FURTHER]
    start = None if chunks is None else chunk_lines.start_of(first, *chunks)
    text = hf_config.text_config(step.config)
    positions = getattr(text, "max_position_embeddings", None) or LONGEST[0]
    for longest in LONGEST if step.length is None and step.tokens else (None,):
        if (longest or 0) > positions:
            continue
        # None is offloaded there that was not before.
        last = (1 if first == 1 else 16 if smallest is None else MOST), longest
        base = grid(longest, first, start=start)
        beside = [place for place in further if longest and (place[1] or 0) <= longest]
        if longest and (base[-1][1] or 0) > longest:
            continue
        try:
            for place in [last, *base, *beside]:
                if place not in traces:
                    traces[place] = trace(at(step, place))
        except (ValueError, ModuleNotFoundError):  # longer than the model takes, or not planned
            continue
        line = fitted(traces, longest, step.accumulation, smallest, first, chunks)
        if line is not None:
            return line
        del traces[last]
    return None


def chunks_of(step: ModelStep) -> tuple[int, int] | None:
    """(tokens of the smallest chunk of a loss, chunks at most), None where there are too few."""
    from tight_fit.techniques.log_probs import LEAST, tokens_in_chunk  # imports PyTorch

    text = hf_config.text_config(step.config)
    words, width = (getattr(text, name, 0) for name in ("vocab_size", "hidden_size"))
    if not words or not width:
        return None
    many = 1 << 40
    most = many // tokens_in_chunk(many, words, width)
    return (LEAST, most) if most >= chunk_lines.FEW else None


def in_chunks(first: int, least: int, most: int) -> list[Place]:
    """Places at which a line of a loss in chunks is checked, with the least chunks and larger ones;
    the last tells how they grow."""
    last = chunk_lines.larger(first, least, most)
    if first == 1:
        return [(1, 2 * least), (1, 7 * least), (1, most * (least + 64)), last]
    return [(2, least), (8, least // 2), (7, 2 * least), (2 * most, least + 64), last]


def axes_of(step: ModelStep) -> Iterator[tuple[str, int]]:
    """(name, its value in a step's line) of each further axis."""
    if step.kind.classifies:
        labels: Any = step.config.num_labels
        yield "classes", labels
    if step.lora_rank == RANK:
        yield "lora_rank", RANK


def with_axes(
    line: TraceLine, step: ModelStep, axes: Iterable[tuple[str, int]], trace: Any
) -> TraceLine:
    """The line with those of the further axes that it has, each checked."""
    packed = line.packed
    # Often a size grows along an axis as much at every length; where it does not, two tell how.
    grids = [
        grid(packed["longest"], packed["first"], lengths, packed.get("start"))
        for lengths in ((1,) if packed["longest"] is None else (1, 2))
    ]

    @cache
    def traced(name: str, value: int, place: Place) -> Any:
        own: dict[str, Any] = {name: value}
        return trace(at(replace(step, **own), place))

    def holds(longer: TraceLine, name: str, value: int, place: Place) -> bool:
        found = longer.at(place, step.accumulation, {name: value})
        return equal(found, traced(name, value, place))

    def with_axis(name: str, base: int) -> TraceLine | None:
        inside, outside = checks(line)
        for more, places in product(BESIDE[name][0], grids):
            value = base + more
            odd = value + more if (ODD[name] - base) % more else ODD[name]
            with suppress(ValueError):  # more than the model takes
                traces = {place: traced(name, value, place) for place in places}
                for most in BESIDE[name][1]:
                    axis = base, value, most
                    longer = extended(line, name, axis, traces, step.accumulation)
                    if longer is None or not holds(longer, name, odd, inside):
                        break
                    if holds(longer, name, most, outside):
                        return longer
        return None

    for name, base in axes:
        line = with_axis(name, base) or line
    return line


def checks(line: TraceLine) -> list[Place]:
    """Two places. Where there are tokens, none made the line or one of its further axes."""
    first, longest = line.packed["first"], line.packed["longest"]
    lengths = (None, None) if longest is None else (200, 336)
    if "chunks" in line.packed:
        least, _ = line.packed["chunks"]["of"]
        lengths = (8 * least, 7 * least) if first == 1 else (2 * least, least)
    return [(first + more if first > 1 else 1, tokens) for more, tokens in zip((5, 3), lengths)]


def at(step: ModelStep, place: Place) -> ModelStep:
    """A step with other examples per micro-batch and tokens per example."""
    examples, tokens = place
    return replace(step, batch_size=examples * step.accumulation, length=tokens)


def main() -> None:
    """Trace and ship the models that are named, by default all well-known ones."""
    parser = OneLineParser(
        prog="python -m tight_fit.command.ship_traces",
        description="Trace well-known models and keep lines through the traces with the package.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="by default all")
    parser.add_argument("--few", action="store_true", help="only each model's step as it is")
    parser.add_argument("--more", action="store_true", help="only what is not there yet")
    parser.add_argument("--again", action="store_true", help="what is there anew, nothing else")
    asked = parser.parse_args()
    ship(asked.models or model_names.known(), asked.few, asked.more, asked.again)


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m tight_fit.command.ship_traces"))
