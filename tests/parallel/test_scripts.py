"""The scripts that lessons show: every way to split the same training gives the same losses."""

import json
import re

import pytest

from tests.forked import forked
from tests.small import ROOT

SCRIPTS, RANKS = ROOT / "scripts", ROOT / "tests" / "ranks"
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")
STEPS = ("--steps", 3)
CLOSE = 2e-4  # printed to four digits


def run(name, *arguments, ranks=2):
    """What each rank of a script printed."""
    return forked(SCRIPTS / name, *arguments, ranks=ranks)


def losses(printed):
    """{step: loss} of what ranks printed."""
    return {int(step): float(loss) for text in printed for step, loss in LOSS.findall(text)}


@pytest.fixture(scope="module")
def alone():
    """The first and the last loss of one process."""
    return losses(run("ddp.py", *STEPS, ranks=1))


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("ddp.py", ()),
        ("tensor_parallel.py", ()),
        ("pipeline.py", ("--schedule", "gpipe")),
        ("pipeline.py", ("--schedule", "1f1b")),
    ],
)
def test_two_ranks_have_the_losses_of_one_process(name, arguments, alone):
    split = losses(run(name, *STEPS, *arguments))
    assert split == pytest.approx(alone, abs=CLOSE) and alone[3] < alone[1]


def test_layers_that_are_cut_are_clipped_and_trained_by_the_optimizer_of_cuda(alone):
    clipped = (RANKS / "foreach.py", SCRIPTS / "tensor_parallel.py", *STEPS, "--clip", 0.01)
    two, one = (losses(forked(*clipped, ranks=ranks)) for ranks in (2, 1))
    assert two == pytest.approx(one, abs=CLOSE) and two[3] < two[1]
    assert two[1] == pytest.approx(alone[1], abs=CLOSE)  # nothing is clipped before the first step


def test_shards_of_two_ranks_are_resumed_by_three(alone, tmp_path):
    """Three steps and three more are the six steps of a run that never stopped."""
    saved = losses(run("fsdp.py", *STEPS, "--save", tmp_path / "state"))
    assert saved == pytest.approx(alone, abs=CLOSE)
    resumed = losses(run("fsdp.py", *STEPS, "--resume", tmp_path / "state", ranks=3))
    whole = losses(run("ddp.py", "--steps", 6, ranks=1))
    assert set(resumed) == {4, 6} and resumed[6] == pytest.approx(whole[6], abs=CLOSE)


# -- texts and experts that are cut ---------------------------------------------------------------


@pytest.mark.parametrize("ranks, heads, key_heads", [(2, 4, 2), (3, 4, 1)])
def test_attention_and_its_gradients_are_those_of_one_process(ranks, heads, key_heads):
    arguments = (SCRIPTS / "context_parallel.py", heads, key_heads)
    each = 2 * 8 * 4 * 8  # bytes of one head on one rank: examples, tokens, width, float64
    for text in forked(RANKS / "context.py", *arguments, ranks=ranks):
        found = json.loads(text)
        assert ("ulysses" in found) == (key_heads % ranks == 0)
        assert all(max(way["apart"]) < 1e-12 for way in found.values())
        ring = (3 * ranks - 2) * 2 * key_heads * each
        assert found["ring"]["sent"] == found["ring"]["metered"] == ring
        if "ulysses" in found:  # queries, keys, values, output, each forward and backward
            turned = 2 * (2 * heads + 2 * key_heads) * each
            assert found["ulysses"]["sent"] == turned * (ranks - 1) / ranks


@pytest.mark.parametrize("top_k, capacity", [(1, 8.0), (2, 0.7)])
def test_experts_on_two_ranks_are_those_of_one_process(top_k, capacity):
    """With seats for all, and with dropped tokens."""
    arguments = (SCRIPTS / "expert_parallel.py", top_k, capacity)
    for text in forked(RANKS / "experts.py", *arguments, ranks=2):
        found = json.loads(text)
        assert max(found["apart"].values()) < 1e-12, found["apart"]
        ours, theirs = found["dropped"]
        assert ours == theirs and (ours > 0) == (capacity < 1)
        assert 2 * found["held"][0] == found["held"][1]


@pytest.fixture(scope="module")
def whole_text():
    return run("context_parallel.py", "--attention", "sdpa", "--length", 64, *STEPS, ranks=1)


def bytes_kept(text):
    return int(re.search(r"([\d,]+) bytes", text)[1].replace(",", ""))


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_a_model_whose_text_is_cut_has_the_losses_of_one_process(attention, whole_text):
    printed = run("context_parallel.py", "--attention", attention, "--length", 64, *STEPS)
    assert losses(printed[:1]) == pytest.approx(losses(whole_text), abs=CLOSE)
    assert losses(whole_text) and not losses(printed[1:])
    kept = [bytes_kept(text) for text in printed]
    assert kept[0] == kept[1] < 0.6 * bytes_kept(*whole_text)


def test_experts_train_to_the_losses_of_one_process():
    plenty = ("expert_parallel.py", *STEPS, "--capacity", 4)
    one, two = (losses(run(*plenty, ranks=ranks)) for ranks in (1, 2))
    assert two == pytest.approx(one, abs=CLOSE) and one


@pytest.mark.parametrize(
    "script, arguments, ranks, says",
    [("tensor", ("--clip", 0), 2, "--clip must be more than 0"),
     ("pipeline", ("--clip", 0), 2, "--clip must be more than 0"),
     ("pipeline", ("--micro-batches", 1), 2, "1f1b needs a micro-batch per rank"),
     ("context", ("--length", 66), 2, "--length 66 cannot be cut into 4 parts: use a multiple"),
     ("context", ("--attention", "ulysses", "--length", 66), 3, "2 key and value heads cannot be"),
     ("context", ("--attention", "sdpa"), 2, "--attention sdpa needs all tokens on one rank"),
     ("context", ("--steps", 0), 1, "--steps must be at least 1, and --length at least 2."),
     ("expert", ("--experts", 3), 2, "3 experts cannot be dealt out to 2 ranks evenly."),
     ("expert", ("--batch-size", 9), 2, "--batch-size 9 cannot be divided by 2 ranks."),
     ("expert", ("--balance", -1), 1, "--balance must be at least 0"),
     ("expert", ("--top-k", 9), 1, "--top-k must be from 1 to --experts"),
     ("expert", ("--capacity", "inf"), 1, "--capacity above 0 up to --experts"),
     ("expert", ("--steps", 10**5), 1, "tokens to predict: take fewer --steps.")],
)  # fmt: skip
def test_what_a_script_cannot_do_it_says_in_one_sentence(script, arguments, ranks, says):
    name = f"{script}.py" if script == "pipeline" else f"{script}_parallel.py"
    with pytest.raises(RuntimeError) as caught:
        run(name, *arguments, ranks=ranks)
    assert says in str(caught.value).strip().splitlines()[-1]
    assert "Traceback" not in str(caught.value)
