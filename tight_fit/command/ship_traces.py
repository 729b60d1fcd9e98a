"""Lines through traces of well-known models, kept with the package: `python -m
tight_fit.command.ship_traces`.

With them the command answers a first question about such a model without PyTorch, whatever its
batch size, GPU and, within bounds, length. The steps are each model's as it is, and those with the
changes that most people make, alone and together. Lines with further axes give other numbers of
classes and ranks of adapters (`with_axes`). Of optimizers only their parts are kept
(`plans.other_optimizer`). A loss in chunks has a line where these are alike; offloaded activations
have one where all are large enough to be offloaded.

Nothing here notices that the planner itself has changed: `tests/command/test_shipped_traces.py`
traces a sample anew and compares. Where they differ, ship all of them again.
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
from tight_fit.command.wrapper import run
from tight_fit.models import config as hf_config
from tight_fit.models import names as model_names
from tight_fit.models.config import LANGUAGE_MODELS
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import OPTIMIZERS
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
from tight_fit.search.remedies import RANK, Remedies

# Ranks of adapters of which an optimizer's part and a line of offloaded activations are kept: from
# some rank on the activations of the adapters are offloaded as well.
RANKS = (RANK, 16, 32, 64)
# Fields whose values are taken with each of the others'.
TOGETHER: dict[str, tuple[Any, ...]] = {
    "precision": (None, "bf16", "fp16"),
    "accumulation": (1, 2),  # that with more micro-batches is computed from it
    "checkpointing": (False, True),
    "lora_rank": (None, RANK),
}
ALONE: tuple[dict[str, Any], ...] = (
    {"precision": "fp16"},
    {"weights": "bf16", "precision": "bf16"},
    {"offload": "activations"},
    {"offload": "activations", "precision": "fp16"},
    {"offload": "activations", "precision": "bf16"},
)
# Taken in each precision.
IN_EACH: tuple[dict[str, Any], ...] = (
    {"attention": "eager"},
    {"compile": True},
    {"lora_rank": RANK, "lora_targets": "all-linear"},
    {"optimizer_in_backward": True, "max_grad_norm": None},
)
# DPO, whose examples are pairs of answers.
OF_PAIRS: tuple[dict[str, Any], ...] = tuple(
    {"task": "dpo", "lora_rank": rank, "checkpointing": again}
    for rank, again in product((None, RANK), (False, True))
)
# Each number of frozen layers has a line in a model with fewer than twice as many layers, every
# second number in one with twice as many, and so on.
FROZEN = 12
OTHERS: tuple[dict[str, Any], ...] = (
    *({"optimizer": name} for name in OPTIMIZERS if name not in ("adamw", "muon")),
    {"offload": "optimizer"},
)
FURTHER: list[Place] = [(5, 200), (3, 333)]  # where a line is checked, beside its longest length
LARGE: list[Place] = [(48, 176), (50, 333)]  # the same of a line of offloaded activations
# Of each further axis what is added to its value for the traces that give it, and its largest
# value, at which it is checked: of both the first that holds. Beyond some rank the optimizer issues
# more kernels, as each takes a limited number of elements.
BESIDE = {"classes": ((1,), (1000,)), "lora_rank": ((4, 8), (256, 64, 32))}
ODD = {"classes": 7, "lora_rank": 4}  # checked as well, or the next value where no step leads there
LONGEST = (4096, 2048, 1024, 512)  # tokens up to which a line is taken, the first that holds


def ship(names: Iterable[str], few: bool = False, more: bool = False) -> None:
    """Trace the steps of models and write the files that `kept_traces.ShippedLines` reads.

    few   only each model's step as it is
    more  what is there stays, and only what is missing is traced
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
        try:
            _trace_all(step_of(asked), few, trace, lines, parts)
        finally:  # what was traced before an interruption is kept; `more` goes on from there
            print(f"{name}: {len(lines)} lines, {len(parts)} parts", file=sys.stderr, flush=True)
            if lines:
                ShippedLines.write(asked.values, head, lines, parts)


def _trace_all(
    step: ModelStep, few: bool, trace: Any, lines: dict[str, TraceLine], parts: dict[str, Any]
) -> None:
    """Add lines and parts of a step that are not there yet."""
    for changed in [step] if few else steps_of(step):
        key = question.digest(general(changed, "cuda"))
        line = lines.get(key) or line_of(changed, trace)
        if line is not None:
            known = line.packed.get("axes", {})
            # With other values more activations may be large enough to be offloaded.
            none = few or changed.offload == "activations"
            axes = [] if none else [axis for axis in axes_of(changed) if axis[0] not in known]
            lines[key] = with_axes(line, changed, axes, trace)
    usual = cache(trace)  # with fused AdamW: the same beside each of the other optimizers
    for changed in [] if few else with_optimizers(step):
        parts |= part_of(changed, trace, parts, usual)


def steps_of(step: ModelStep) -> Iterator[ModelStep]:
    """A step with the changes that it takes."""
    yield from _changed(step, _together(step))
    yield from _changed(step, _alone(step))


def _changed(step: ModelStep, changes: Iterable[dict[str, Any]]) -> Iterator[ModelStep]:
    for change in changes:
        changed = change | {"precision": change.get("precision") or step.precision}
        with suppress(ValueError):
            yield replace(step, **changed)
        if "accumulation" in change:  # one example per micro-batch
            with suppress(ValueError):
                yield replace(step, **changed, batch_size=change["accumulation"])


def _together(step: ModelStep) -> Iterator[dict[str, Any]]:
    """Changes of `TOGETHER`; of a language model also in 4 bits, and with its loss in chunks."""
    in_four = Remedies(step, "H100").four_bits()
    for loss in ("full", "chunked") if step.task in LANGUAGE_MODELS else ("full",):
        for values in product(*TOGETHER.values()):
            change = dict(zip(TOGETHER, values), loss=loss)
            # Weights in 16 bits take autocast of their own dtype.
            if step.weights == "fp32" or change["precision"] is None:
                yield change
            if change["precision"] is None and change["lora_rank"]:
                yield from (change | other for other in in_four)


def _alone(step: ModelStep) -> Iterator[dict[str, Any]]:
    yield from ALONE
    for rank, base in product(RANKS, ({}, *Remedies(step, "H100").four_bits())):
        yield {**base, "offload": "activations", "lora_rank": rank}
    for precision in TOGETHER["precision"] if step.weights == "fp32" else (None,):
        yield from ({"precision": precision, **change} for change in IN_EACH)
    if step.task == "causal-lm":
        yield from OF_PAIRS
    layers = getattr(hf_config.text_config(step.config), "num_hidden_layers", 0)
    for number in range(layers, 0, -max(1, layers // FROZEN)):
        yield {"frozen": number}


def with_optimizers(step: ModelStep) -> Iterator[ModelStep]:
    """A step with each of the other optimizers, whose parts are of use in others."""
    in_four = Remedies(step, "H100").four_bits()
    adapters = [base | {"lora_rank": rank} for rank in RANKS for base in ({}, *in_four)]
    for precision, which in product((step.precision, "fp16"), ({}, *adapters)):
        for other in OTHERS:
            if step.weights == "fp32" or precision != "fp16":
                with suppress(ValueError):
                    yield replace(step, **{"precision": precision} | which | other)


def part_of(
    step: ModelStep, trace: Any, parts: Container[str], usual: Any
) -> dict[str, dict[str, Any]]:
    """{key: the part of a step's optimizer}, empty where it is none by itself or is there.

    usual  traces the step with fused AdamW
    """
    alone = plain(at(step, FIRST if step.tokens else (FIRST[0], None)))
    beside = with_adamw(alone) if alone else None
    if alone is None or beside is None:
        return {}
    key = question.digest(general(alone, "cuda"))
    if key in parts:
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
    positions = getattr(hf_config.text_config(step.config), "max_position_embeddings", LONGEST[0])
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
    asked = parser.parse_args()
    ship(asked.models or model_names.known(), asked.few, asked.more)


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m tight_fit.command.ship_traces"))
