"""Lines through traces of well-known models, kept with the package: `python -m
tight_fit.command.ship_traces`.

With them the command answers a first question about such a model without PyTorch, whatever its
batch size, GPU and, within bounds, length. The steps are each model's as it is, and those with one
change that most people make. A loss in chunks and offloaded activations have no lines, as the
number of their operations changes with the sizes.

Nothing here notices that the planner itself has changed: `tests/command/test_shipped_traces.py`
traces a sample anew and compares. Where they differ, ship all of them again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
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
from tight_fit.plans.batch_line import general
from tight_fit.plans.trace_line import Place, TraceLine, fitted, grid
from tight_fit.search.remedies import RANK, Remedies

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"accumulation": 2},  # that with more micro-batches is computed from it
    {"checkpointing": True},
    {"lora_rank": RANK},
    {"optimizer": "adamw8bit"},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"weights": "bf16", "precision": "bf16"},
    {"offload": "optimizer"},
)
FURTHER: list[Place] = [(5, 200), (3, 333)]  # where a line is checked, beside its longest length
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
        for step in steps_of(step_of(asked), CHANGES[:1] if few else CHANGES):
            key = question.digest(general(step, "cuda"))
            line = None if key in lines else line_of(step, trace)
            if line is not None:
                lines[key] = line
        print(f"{name}: {len(lines)} lines", file=sys.stderr, flush=True)
        if lines:
            ShippedLines.write(asked.values, head, lines)


def steps_of(step: ModelStep, changes: Iterable[dict[str, Any]]) -> Iterator[ModelStep]:
    """A step with each of the changes that it takes, and in 4 bits where the first of them has
    company."""
    changes = list(changes)
    if len(changes) > 1:
        changes += Remedies(step, "H100").four_bits()
    for change in changes:
        with suppress(ValueError):
            yield replace(step, **change)


def line_of(step: ModelStep, trace: Any) -> TraceLine | None:
    """The line of a step, through traces that `trace(step)` makes; None where there is none."""
    traces: dict[Place, Any] = {}
    for longest in LONGEST if step.length is None and step.tokens else (None,):
        last = 16, longest
        try:
            for place in [last, *grid(longest), *(FURTHER if longest else [])]:
                if place not in traces:
                    traces[place] = trace(at(step, place))
        except (ValueError, ModuleNotFoundError):  # longer than the model takes, or not planned
            continue
        line = fitted(traces, longest, step.accumulation)
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
