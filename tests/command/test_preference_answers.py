"""`tight-fit MODEL --task dpo` and `--task grpo`: what is planned, in words and in facts."""

import json

import pytest

from tests.command.test_plan_command import asked, own_cache  # noqa: F401
from tight_fit.command import main as with_layouts
from tight_fit.command import question
from tight_fit.command.answer import step_of
from tight_fit.command.options import parser
from tight_fit.plans.model import plan_model
from tight_fit.techniques import references


@pytest.mark.parametrize(
    "typed, words",
    [
        (["dpo"], "4 pairs of 32 tokens, a reference model in memory"),
        (["dpo", "--lora", "2"], "the base without adapters as reference, LoRA rank 2"),
        (["dpo", "--reference", "precomputed"], "log-probabilities of the reference computed"),
        (["grpo"], "4 completions of 32 tokens, 16 of them written, no reference"),
        (
            ["grpo", "--completion", "9", "--reference", "model"],
            "9 of them written, a reference model in memory",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_the_answer_says_what_is_compared(typed, words, folder, capsys):
    options = ["--batch", 4, "--length", 32, "--gpu", "T4", "--quick"]
    code, text = asked(capsys, folder, *options, "--task", *typed)
    assert code == 0 and words in text.splitlines()[1]
    assert ("vLLM" in text) == (typed[0] == "grpo")
    assert "evaluation" not in text


def test_json_holds_the_plan_of_a_pair(folder, capsys):
    typed = [folder, "--task", "dpo", "--batch", 4, "--length", 32, "--gpu", "T4", "--quick"]
    facts = json.loads(asked(capsys, *typed, "--json")[1])
    planned = plan_model(folder, gpu="T4", batch_size=4, length=32, task="dpo")
    assert (facts["peak"], facts["reference"]) == (planned.peak, "model")
    assert facts["tokens_per_second"] == pytest.approx(2 * 32 * facts["examples_per_second"])


def test_every_option_is_a_field(folder):
    typed = [str(folder), "--task", "grpo", "--completion", "9", "--reference", "model"]
    step = step_of(question.of(parser().parse_args(typed)))
    assert (step.task, step.completion, step.reference) == ("grpo", 9, "model")


def test_an_engine_holds_a_copy_of_the_weights(folder, capsys):
    typed = [folder, "--task", "grpo", "--batch", 4, "--length", 32, "--gpu", "T4", "--quick"]
    facts = json.loads(asked(capsys, *typed, "--json")[1])
    (note,) = [note for note in facts["notes"] if "vLLM" in note]
    share, weights = 0.3 * facts["card_memory"] / 2**30, 4 * facts["parameters"] / 2**10
    assert f"{share:.2f} GiB here" in note and f"({weights:.1f} KiB)" in note


@pytest.mark.parametrize("layout", [["--layout", "fsdp=2"], ["--gpus", "2"]], ids=" ".join)
@pytest.mark.parametrize("task", references.TASKS)
def test_several_gpus_are_refused_in_one_sentence(task, layout, folder, capsys):
    typed = ["--gpu", "T4", "--task", task, "--batch", "4", "--length", "32", *layout]
    with pytest.raises(SystemExit) as ended:
        with_layouts.main([str(folder), *typed])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"task='{task}' is planned on one GPU" in said
