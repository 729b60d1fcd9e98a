"""Answers about layouts that are kept for lessons are those that the planner gives."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import nbformat
import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from helpers import kept_layouts
from helpers.show import layouts
from tests.night import few_by_day
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import SCHEDULES, parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.config import read
from tight_fit.models.step import ModelStep
from tools.course import NOTEBOOKS, kept_plans

PAIR = Cluster("RTX 3060", per_machine=2)
QUESTIONS = list(kept_plans.questions())


def test_all_that_lessons_ask_is_kept_and_nothing_else():
    assert set(kept_layouts._kept()) == {kept_layouts.key(*one) for one in QUESTIONS}


@pytest.mark.parametrize(
    "asked",
    # Those that take seconds to plan: by day; the others by night.
    few_by_day([(one,) for one in QUESTIONS], lambda values: values[0][0].tokens in (None, 8_192)),
    ids=lambda asked: f"{asked[0].config.model_type}, {asked[1]}, {asked[1].schedule}, {asked[2]}",
)
def test_what_is_kept_is_planned_alike_today(asked):
    assert kept_layouts.facts(*asked) == kept_plans.plan_one(*asked)


@pytest.mark.parametrize("number, tables", [("13", 3), ("15", 3), ("16", 3), ("24", 1)])
def test_what_a_lesson_shows_is_kept(number, tables, monkeypatch):
    """What its cells give to `show.layouts`: a reader would wait minutes for other plans."""
    planned = Mock(side_effect=AssertionError("not kept: add it to kept_plans.questions"))
    monkeypatch.setattr("tight_fit.layouts.facts.plan_step", planned)
    names = {"Cluster": Cluster, "ModelStep": ModelStep, "SCHEDULES": SCHEDULES, "parse": parse}
    names |= {"read": read, "replace": replace, "show": SimpleNamespace(layouts=layouts)}
    names |= {"Qwen3MoeConfig": Qwen3MoeConfig, "display": print}
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    shown = [source for source in cells if "show.layouts(" in source]
    assert len(shown) >= tables
    for source in shown:
        exec(source, names)


def small(**changed):
    config = LlamaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, **changed)
    return ModelStep(config, batch_size=4, length=16, weights="fp32")


def test_what_is_not_kept_is_planned_once_for_all_clusters(monkeypatch):
    plan = Mock(wraps=plan_step)
    monkeypatch.setattr("tight_fit.layouts.facts.plan_step", plan)
    job = small(intermediate_size=88)  # that nobody else plans
    kept_layouts.facts(job, parse("ddp=2"), Cluster("T4", 2))
    facts = kept_layouts.facts(job, parse("ddp=2"), PAIR)
    assert plan.call_count == 1
    assert facts["fits"] and facts["need"] > 0 and facts["sent"]["data"]["all_reduce"] > 0


def test_a_question_is_told_from_every_other():
    two, other = parse("ddp=2"), small(intermediate_size=96)
    asked = [(small(), two, PAIR), (other, two, PAIR), (small(), two, Cluster("T4", 2))]
    for layout in (parse("fsdp=2"), *(parse("pipeline=2", schedule=s) for s in ("1f1b", "gpipe"))):
        asked.append((small(), layout, PAIR))
    assert len({kept_layouts.key(*one) for one in asked}) == len(asked)
    assert kept_layouts.key(*asked[0]) == kept_layouts.key(small(), parse("ddp=2"), PAIR)
