"""Answers for well-known models, planned and kept with the package: `python -m
tight_fit.command.ship`.

The questions are those that most people ask: each model as it is, and the GPUs of the list as well
as the usual sizes. Figures of time are kept to six digits.

Nothing here notices that the planner itself has changed: `tests/command/test_known.py` plans a
sample of the answers anew and compares them to the byte. Where they differ, ship all of them again.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tight_fit import gpus
from tight_fit.command import kept, question
from tight_fit.command.answer import Answers
from tight_fit.command.arguments import OneLineParser
from tight_fit.command.question import Question
from tight_fit.command.wrapper import run
from tight_fit.gpus import GPU, GPUS
from tight_fit.models import names as model_names

SIZES = ("6GB", "8GB", "12GB", "16GB", "24GB", "48GB")


def asked_of(name: str) -> Question:
    """The question about a model without a GPU."""
    return Question(name, name, model_names.known()[name], {})


def ship(names: Iterable[str] | None = None) -> None:
    """Plan the models, by default all, and write the file that `kept.shipped` reads.

    Answers about other models stay, where the same versions of the libraries made them.
    """
    names = list(names or model_names.known())
    everywhere: list[GPU] = [*GPUS.values(), *map(gpus.find, SIZES)]
    plans, answers = _of_others({model_names.full_name(name) for name in names})
    for name in map(model_names.full_name, names):
        print(name, file=sys.stderr, flush=True)
        asked = asked_of(name)
        maker = Answers(asked)
        plans.append(_rounded(maker.shared()))
        for gpu in (None, *everywhere):
            facts = maker.on(gpu) | (maker.advice(gpu) if gpu else {})
            key = replace(asked, gpu=gpu).key
            answers[key] = {"plan": len(plans) - 1, "facts": _rounded(facts)}
        del plans[-1]["planned_with"]
        text = json.dumps({"versions": question.versions(), "plans": plans, "answers": answers})
        _write(text)


def _of_others(names: set[str]) -> tuple[list[Any], dict[str, Any]]:
    """(plans, answers) that are kept about models that are not among `names`."""
    with lzma.open(kept.SHIPPED, "rt", encoding="utf8") as file:
        before = json.load(file)
    if before["versions"] != question.versions():
        return [], {}
    stay = [plan for plan in before["plans"] if plan["model"] not in names]
    place = {before["plans"].index(plan): number for number, plan in enumerate(stay)}
    answers = {
        key: answer | {"plan": place[answer["plan"]]}
        for key, answer in before["answers"].items()
        if answer["plan"] in place
    }
    return stay, answers


def _write(text: str) -> None:
    """Whole or not at all: an interrupt leaves the models that were done before it."""
    unfinished = kept.SHIPPED.with_suffix(".unfinished")
    unfinished.write_bytes(lzma.compress(text.encode(), preset=9))
    os.replace(unfinished, kept.SHIPPED)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    """Plan and ship the models that are named, by default all well-known ones."""
    parser = OneLineParser(
        prog="python -m tight_fit.command.ship",
        description="Plan well-known models anew and keep their answers with the package.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="only these, beside what is kept of others; by default all",
    )
    ship(parser.parse_args().models)


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m tight_fit.command.ship"))
