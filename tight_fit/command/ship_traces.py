"""Lines through traces of well-known models, kept with the package: `python -m
tight_fit.command.ship_traces`.

With them the command answers a first question about such a model without PyTorch, whatever its
batch size, GPU and, within bounds, length. The steps are each model's as it is, and those with the
changes that most people make, alone and together. Of optimizers only their parts are kept
(`plans.other_optimizer`). A loss in chunks has no lines, as the number of its operations changes
with the sizes; offloaded activations have them where all are large enough to be offloaded.

Nothing here notices that the planner itself has changed: `tests/command/test_shipped_traces.py`
traces a sample anew and compares. Where they differ, ship all of them again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from tight_fit.command import question
from tight_fit.command.answer import quietly, step_of, trainer_optimizer
from tight_fit.command.arguments import OneLineParser
from tight_fit.command.kept_traces import ShippedLines
from tight_fit.command.ship import asked_of
from tight_fit.command.wrapper import run
from tight_fit.models import config as hf_config
from tight_fit.models import names as model_names
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import OPTIMIZERS
from tight_fit.plans.batch_line import general
from tight_fit.plans.other_optimizer import optimizer_part, plain, with_adamw
from tight_fit.plans.trace_line import FIRST, MANY, MOST, Place, TraceLine, fitted, grid
from tight_fit.search.remedies import RANK, Remedies

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
    {"offload": "activations", "lora_rank": RANK},
    {"offload": "activations", "precision": "fp16"},
    {"offload": "activations", "precision": "bf16"},
)
OTHERS: tuple[dict[str, Any], ...] = (
    *({"optimizer": name} for name in OPTIMIZERS if name not in ("adamw", "muon")),
    {"offload": "optimizer"},
)
FURTHER: list[Place] = [(5, 200), (3, 333)]  # where a line is checked, beside its longest length
LARGE: list[Place] = [(48, 176), (50, 333)]  # the same of a line of offloaded activations
LONGEST = (4096, 512)  # tokens up to which a line is taken, the first of them that holds


def ship(names: Iterable[str], few: bool = False) -> None:
    """Trace the steps of models and write the files that `kept_traces.ShippedLines` reads.

    few  only each model's step as it is
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
        lines: dict[str, TraceLine] = {}
        parts: dict[str, dict[str, Any]] = {}
        step = step_of(asked)
        for changed in [step] if few else steps_of(step):
            key = question.digest(general(changed, "cuda"))
            line = None if key in lines else line_of(changed, trace)
            if line is not None:
                lines[key] = line
        for changed in [] if few else with_optimizers(step):
            parts |= part_of(changed, trace)
        print(f"{name}: {len(lines)} lines, {len(parts)} parts", file=sys.stderr, flush=True)
        if lines:
            ShippedLines.write(asked.values, head, lines, parts)


def steps_of(step: ModelStep) -> Iterator[ModelStep]:
    """A step with the changes that it takes, and in 4 bits."""
    changes = [dict(zip(TOGETHER, values)) for values in product(*TOGETHER.values())]
    if step.weights != "fp32":  # which take autocast of their own dtype
        changes = [change for change in changes if change["precision"] is None]
    for change in [*changes, *ALONE, *Remedies(step, "H100").four_bits()]:
        with suppress(ValueError):
            yield replace(step, **change | {"precision": change.get("precision") or step.precision})


def with_optimizers(step: ModelStep) -> Iterator[ModelStep]:
    """A step with each of the other optimizers, whose parts are of use in others."""
    for precision, rank in product((step.precision, "fp16"), (None, RANK)):
        for other in OTHERS:
            if step.weights == "fp32" or precision != "fp16":
                with suppress(ValueError):
                    yield replace(step, precision=precision, lora_rank=rank, **other)


def part_of(step: ModelStep, trace: Any) -> dict[str, dict[str, Any]]:
    """{key: the part of a step's optimizer}, empty where it is none by itself."""
    alone = plain(at(step, FIRST if step.tokens else (FIRST[0], None)))
    usual = with_adamw(alone) if alone else None
    if alone is None or usual is None:
        return {}
    try:
        part = optimizer_part(trace(alone), trace(usual))
    except (ValueError, ModuleNotFoundError):
        return {}
    return {question.digest(general(alone, "cuda")): part} if part else {}


def line_of(step: ModelStep, trace: Any) -> TraceLine | None:
    """The line of a step, through traces that `trace(step)` makes; None where there is none."""
    traces: dict[Place, Any] = {}
    first, further, smallest = FIRST[0], FURTHER, None
    if step.offload == "activations":
        from tight_fit.techniques.activation_offload import SMALLEST  # imports PyTorch

        first, further, smallest = MANY, LARGE, SMALLEST
    for longest in LONGEST if step.length is None and step.tokens else (None,):
        last = (16 if smallest is None else MOST), longest  # none is offloaded that was not before
        try:
            for place in [last, *grid(longest, first), *(further if longest else [])]:
                if place not in traces:
                    traces[place] = trace(at(step, place))
        except (ValueError, ModuleNotFoundError):  # longer than the model takes, or not planned
            continue
        line = fitted(traces, longest, step.accumulation, smallest)
        if line is not None:
            return line
        del traces[last]
    return None


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
    asked = parser.parse_args()
    ship(asked.models or model_names.known(), asked.few)


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m tight_fit.command.ship_traces"))
