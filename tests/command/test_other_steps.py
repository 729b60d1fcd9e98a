"""Answers about steps of other kinds: products in FP8, preferences and rewards."""

import pytest

STEP = "--batch 4 --length 32 --quick"


def test_the_answer_says_how_products_are_scaled_and_what_is_not_planned(ask):
    code, text = ask(f"{STEP} --gpu L4 --float8 rowwise")
    assert code == 0 and "products of linear layers in FP8 scaled rowwise" in text.splitlines()[0]
    assert "torch.compile, without which torchao's float8 is slower than this" in text
    together = ask(f"{STEP} --gpu L4 --float8 rowwise --compile")[1]
    assert "without which" not in together and "joins the casts to FP8" in together
    assert "FP8" not in ask(f"{STEP} --gpu L4")[1]


def test_only_gpus_with_fp8_hold_and_time_products_in_it(facts):
    cards = facts(f"{STEP} --float8 tensorwise")["cards"]
    assert cards["L4"] and not cards["A100-80GB"] and not cards["T4"]
    timed = facts(f"{STEP} --gpu 24GB --float8 tensorwise")["seconds_by_gpu"]
    assert "RTX 4090" in timed and "RTX 3090" not in timed


def test_a_layout_in_fp8_is_planned_compiled(ask):
    step = STEP.removesuffix(" --quick")
    code, text = ask(f"{step} --float8 tensorwise --gpu H100 --layout fsdp=2 --compile")
    assert code == 0
    assert "each layer compiled, products of linear layers in FP8 scaled tensorwise" in text


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
    code, text = ask(f"{STEP} --gpu T4 --task {task}")
    assert code == 0 and words in text.splitlines()[1]
    assert ("vLLM" in text) == task.startswith("grpo") and "evaluation" not in text


def test_tokens_of_a_pair_and_an_engine_s_copy_of_the_weights(facts):
    found = facts(f"{STEP} --gpu T4 --task dpo")
    assert found["reference"] == "model"
    assert found["tokens_per_second"] == pytest.approx(2 * 32 * found["examples_per_second"])
    found = facts(f"{STEP} --gpu T4 --task grpo")
    (note,) = [note for note in found["notes"] if "vLLM" in note]
    share, weights = 0.3 * found["card_memory"] / 2**30, 4 * found["parameters"] / 2**10
    assert f"{share:.2f} GiB here" in note and f"({weights:.1f} KiB)" in note
