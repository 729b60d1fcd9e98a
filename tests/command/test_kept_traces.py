"""Traces that are kept: an answer from them is the answer of a plan made anew, without PyTorch."""

import json
import random
from dataclasses import fields, replace

import pytest

from tests.small import python
from tight_fit import gpus
from tight_fit.command import kept, kept_traces, question
from tight_fit.command.answer import answers, attention_of, step_of
from tight_fit.command.kept_traces import KeptTraces
from tight_fit.command.options import parser
from tight_fit.command.question import Question
from tight_fit.models import config as hf_config
from tight_fit.models import names as model_names
from tight_fit.models.evaluation import logits_bytes
from tight_fit.models.remembered import Remembered
from tight_fit.models.step import ModelStep

# Fields of a step that are drawn; those that do not go together are refused, and drawn again.
DRAWN = {
    "batch_size": (1, 2, 4, 6),
    "accumulation": (1, 2),
    "length": (8, 24, 32),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer": ("adamw", "adamw_foreach", "sgd", "adafactor"),
    "checkpointing": (False, True),
    "lora_rank": (None, 4),
    "lora_targets": ("query-value", "all-linear"),
    "weights": (None, "bf16"),
    "attention": (None, "eager"),
    "loss": ("full", "chunked"),
    "task": (None, "sequence-classification", "dpo"),
}
# One known model of each architecture.
KNOWN = {values["model_type"]: name for name, values in model_names.known().items()}
ALONE = """
import sys
from tight_fit.command.main import main
status = main(sys.argv[1:])
there = {"torch", "transformers", "scipy"} & set(sys.modules)
assert not there, there
raise SystemExit(status)
"""


def drawn(draw: random.Random, folder) -> Question:
    """A question, without advice, which would trace a dozen steps."""
    while True:
        chosen = {name: draw.choice(values) for name, values in DRAWN.items()}
        given = {name: value for name, value in chosen.items() if value not in (None, False)}
        gpu = gpus.find(draw.choice(("T4", "RTX 4090", "H100", "8GB")))
        asked = Question("m", "m", model_names.values_of(str(folder)), given, gpu, quick=True)
        try:
            step_of(asked)
        except ValueError:
            continue
        return asked


def of(folder, options: str) -> Question:
    return question.of(parser().parse_args([str(folder), *options.split()]))


def facts_of(asked: Question, fresh: bool) -> str:
    *_, last = answers(asked, fresh=fresh)
    return json.dumps(last, sort_keys=True)


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_from_kept_traces_is_that_of_a_plan_made_anew(seed, folder, no_trace):
    asked = drawn(random.Random(seed), folder)
    anew = facts_of(asked, fresh=True)
    assert facts_of(asked, fresh=False) == anew, "what is remembered of a configuration suffices"
    no_trace()
    assert facts_of(asked, fresh=False) == anew


def test_another_gpu_and_a_change_that_was_tried_are_not_traced_again(folder, no_trace):
    asked = of(folder, "--gpu 4GB --batch 20000")
    *_, first = answers(asked)
    (change, *_) = [change for change in first["would_fit"] if "accumulation" in change]
    no_trace()
    other = replace(asked, gpu=gpus.find("80GB"), quick=True)
    (facts,) = answers(other)
    assert facts["peak"] == first["peak"] and facts["fits"]
    (facts,) = answers(replace(other, fields=asked.fields | change))
    assert facts["peak"] < first["peak"]


def test_a_second_question_needs_no_pytorch(folder, ask):
    options = "--gpu 4GB --batch 20000 --length 16"
    status, fresh = ask(options)
    assert "would fit" in fresh
    for file in kept.folder().glob("*.json"):
        file.unlink()
    ended = python("-c", ALONE, folder, *options.split())
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, fresh, "")


@pytest.mark.parametrize("name", KNOWN.values(), ids=KNOWN)
def test_what_is_remembered_of_a_configuration_answers_as_it_does(name):
    values = model_names.known()[name]
    config = hf_config.from_values(values, name)
    again = Remembered(json.loads(json.dumps(hf_config.remember(config).facts)), values, name)
    for asked in (hf_config.named_task, hf_config.weights_of):
        assert asked(again) == asked(config)
    for task in hf_config.TASKS:
        assert hf_config.kind_of(again, task) == hf_config.kind_of(config, task)
    for task in (None, *hf_config.TASKS):
        try:
            step = ModelStep(config, task=task)
        except ValueError as error:
            with pytest.raises(type(error)) as caught:
                ModelStep(again, task=task)
            assert str(caught.value)[:40] == str(error)[:40]
            continue
        other = ModelStep(again, task=task)
        parts = ["tokens", "image", "reads", "micro_batch", "compared_with"]
        for part in (*parts, *(field.name for field in fields(step) if field.name != "config")):
            assert getattr(other, part) == getattr(step, part)
        assert attention_of(other) == attention_of(step)
        assert logits_bytes(other) == logits_bytes(step)
        assert other.on((7, 5)).flash == step.on((7, 5)).flash
    assert hf_config.read(again).to_dict() == config.to_dict(), "a model is made of the values"


def test_a_step_of_other_micro_batches_is_another_step(folder):
    """Two are traced of however many there are, and FLOPs and seconds are those of all."""
    asked = of(folder, "--gpu T4 --quick")
    for count in (2, 6):
        step = {"batch_size": 4 * count, "accumulation": count, "length": 16}
        some = replace(asked, fields=step)
        assert facts_of(some, fresh=False) == facts_of(some, fresh=True)


def test_a_damaged_trace_is_made_anew(folder, no_trace):
    asked = of(folder, "--gpu T4 --quick")
    anew = facts_of(asked, fresh=False)
    (traces,) = (kept.folder() / "traces").iterdir()
    for number, file in enumerate(sorted(traces.iterdir())):
        file.write_text(("", "no trace", file.read_text()[:-9])[number % 3])
    assert facts_of(asked, fresh=False) == anew
    (traces / "other").write_text("")
    no_trace()
    assert facts_of(asked, fresh=False) == anew, "and kept again"


def test_other_code_or_versions_find_no_trace(folder, monkeypatch):
    values = model_names.values_of(str(folder))
    there = KeptTraces(values).folder
    assert KeptTraces(values | {"vocab_size": 600}).folder != there
    for name, other in (("versions", {"torch": "9.9"}), ("code", "other")):
        with monkeypatch.context() as changed:
            changed.setattr(question, name, lambda other=other: other)
            assert KeptTraces(values).folder != there


def test_few_are_kept_and_a_folder_that_cannot_be_written_keeps_none(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_traces, "OF_MODEL", 3)
    monkeypatch.setattr(kept_traces, "MOST", 2)
    for vocabulary in range(4):
        model = KeptTraces({"vocab_size": vocabulary})
        for number in range(5):
            model.fact(str(number), lambda: 1)
        assert len(list(model.folder.iterdir())) == 3
    assert len(list(model.folder.parent.iterdir())) == 2 and model.folder.exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert KeptTraces({}).fact("a", lambda: 2) == 2
    assert KeptTraces({}).fact("a", lambda: 3) == 3
