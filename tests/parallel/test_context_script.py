"""The scripts of lesson 24: a text, or experts, cut over ranks give what one process gives."""

import json
import re
from pathlib import Path

import pytest

from tests.forked import forked

ROOT = Path(__file__).resolve().parents[2]
RANKS = ROOT / "tests" / "ranks"
CONTEXT = ROOT / "scripts" / "context_parallel.py"
EXPERTS = ROOT / "scripts" / "expert_parallel.py"
LOSS = re.compile(r"loss ([\d.]+)")


def losses(printed):
    return [float(loss) for loss in LOSS.findall(printed)]


@pytest.mark.parametrize("ranks, heads, key_heads", [(2, 4, 2), (3, 4, 1), (2, 2, 2)])
def test_attention_and_its_gradients_are_those_of_one_process(ranks, heads, key_heads):
    printed = forked(RANKS / "context.py", CONTEXT, heads, key_heads, ranks=ranks)
    each = 2 * 8 * 4 * 8  # bytes of one head on one rank: examples, tokens, width, float64
    for text in printed:
        found = json.loads(text)
        assert ("ulysses" in found) == (key_heads % ranks == 0)
        for way in found.values():
            assert max(way["apart"]) < 1e-12
        ring = (3 * ranks - 2) * 2 * key_heads * each
        assert found["ring"]["sent"] == found["ring"]["metered"] == ring
        if "ulysses" in found:  # queries, keys, values, output, each forward and backward
            turned = 2 * (2 * heads + 2 * key_heads) * each
            assert found["ulysses"]["sent"] == turned * (ranks - 1) / ranks


@pytest.mark.parametrize("top_k, capacity", [(2, 4.0), (1, 8.0), (2, 0.7)])
def test_experts_on_two_ranks_are_those_of_one_process(top_k, capacity):
    """With seats for all, and with dropped tokens."""
    for text in forked(RANKS / "experts.py", EXPERTS, top_k, capacity, ranks=2):
        found = json.loads(text)
        assert max(found["apart"].values()) < 1e-12, found["apart"]
        ours, theirs = found["dropped"]
        assert ours == theirs and (ours > 0) == (capacity < 1)
        assert 2 * found["held"][0] == found["held"][1]


@pytest.fixture(scope="module")
def alone():
    steps = ("--attention", "sdpa", "--steps", 2, "--length", 64)
    return forked(CONTEXT, *steps, ranks=1)[0]


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_a_model_whose_text_is_cut_has_the_losses_of_one_process(attention, alone):
    steps = ("--attention", attention, "--steps", 2, "--length", 64)
    printed = forked(CONTEXT, *steps, ranks=2)
    assert losses(printed[0]) == pytest.approx(losses(alone), abs=2e-4)
    assert len(losses(alone)) == 2 and losses(printed[1]) == []
    kept = [int(re.search(r"([\d,]+) bytes", text)[1].replace(",", "")) for text in printed]
    whole = int(re.search(r"([\d,]+) bytes", alone)[1].replace(",", ""))
    assert kept[0] == kept[1] < 0.6 * whole


def test_experts_train_to_the_losses_of_one_process():
    plenty = ("--steps", 3, "--capacity", 4)
    one, two = (forked(EXPERTS, *plenty, ranks=ranks)[0] for ranks in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=2e-4) and len(losses(one)) == 3


@pytest.mark.parametrize(
    "script, arguments, ranks, says",
    [
        (CONTEXT, ("--length", 66), 2, "--length 66 cannot be cut into 4 parts: use a multiple"),
        (CONTEXT, ("--attention", "ulysses", "--length", 66), 3, "2 key and value heads cannot be"),
        (CONTEXT, ("--attention", "sdpa"), 2, "--attention sdpa needs all tokens on one rank"),
        (EXPERTS, ("--experts", 3), 2, "3 experts cannot be dealt out to 2 ranks evenly."),
        (EXPERTS, ("--batch-size", 9), 2, "--batch-size 9 cannot be divided by 2 ranks."),
        (EXPERTS, ("--top-k", 9), 1, "--top-k must be from 1 to --experts"),
        (EXPERTS, ("--capacity", "inf"), 1, "--capacity above 0 up to --experts"),
        (EXPERTS, ("--steps", 10**5), 1, "tokens to predict: take fewer --steps."),
        (CONTEXT, ("--steps", 0), 1, "--steps must be at least 1, and --length at least 2."),
    ],
)
def test_what_cannot_be_cut_ends_in_one_sentence(script, arguments, ranks, says):
    with pytest.raises(RuntimeError) as caught:
        forked(script, *arguments, ranks=ranks)
    assert says in str(caught.value).strip().splitlines()[-1]
    assert "Traceback" not in str(caught.value)
