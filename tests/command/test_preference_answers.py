"""`tight-fit MODEL --task dpo` and `--task grpo`: what is planned, in words and in facts."""

import pytest

from tight_fit.command import question
from tight_fit.command.answer import step_of
from tight_fit.command.options import parser
from tight_fit.plans.model import plan_model
from tight_fit.techniques import references

STEP = "--batch 4 --length 32 --gpu T4"


@pytest.mark.parametrize(
    "task, words",
    [
        ("dpo", "4 pairs of 32 tokens, a reference model in memory"),
        ("dpo --lora 2", "the base without adapters as reference, LoRA rank 2"),
        ("dpo --reference precomputed", "log-probabilities of the reference computed"),
        ("grpo", "4 completions of 32 tokens, 16 of them written, no reference"),
        ("grpo --completion 9 --reference model", "9 of them written, a reference model in memory"),
    ],
)
def test_the_answer_says_what_is_compared(task, words, ask):
    code, text = ask(f"{STEP} --quick --task {task}")
    assert code == 0 and words in text.splitlines()[1]
    assert ("vLLM" in text) == task.startswith("grpo") and "evaluation" not in text


def test_json_holds_the_plan_of_a_pair_and_an_engine_s_copy_of_the_weights(facts, folder):
    found = facts(f"{STEP} --quick --task dpo")
    planned = plan_model(folder, gpu="T4", batch_size=4, length=32, task="dpo")
    assert (found["peak"], found["reference"]) == (planned.peak, "model")
    assert found["tokens_per_second"] == pytest.approx(2 * 32 * found["examples_per_second"])
    found = facts(f"{STEP} --quick --task grpo")
    (note,) = [note for note in found["notes"] if "vLLM" in note]
    share, weights = 0.3 * found["card_memory"] / 2**30, 4 * found["parameters"] / 2**10
    assert f"{share:.2f} GiB here" in note and f"({weights:.1f} KiB)" in note


def test_every_option_is_a_field(folder):
    typed = [str(folder), "--task", "grpo", "--completion", "9", "--reference", "model"]
    step = step_of(question.of(parser().parse_args(typed)))
    assert (step.task, step.completion, step.reference) == ("grpo", 9, "model")


@pytest.mark.parametrize("layout", ["--layout fsdp=2", "--gpus 2"])
@pytest.mark.parametrize("task", references.TASKS)
def test_several_gpus_are_refused_in_one_sentence(task, layout, refuses):
    refuses(f"{STEP} --task {task} {layout}", f"task='{task}' is planned on one GPU")
