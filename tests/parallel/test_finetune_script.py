"""scripts/finetune_llm.py, which needs nothing of the course, fine-tunes the mini decoder."""

import importlib.util
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.forked import forked
from tests.small import ROOT

SCRIPT, DECODER = ROOT / "scripts/finetune_llm.py", ROOT / "helpers" / "mini" / "decoder"
EXAMPLES = [
    {"prompt": "Oil prices rose sharply today.", "answer": "crude"},
    {"prompt": "The company was bought.", "answer": "acq"},
]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("finetune_llm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path):
    """Arguments of a model and its data."""
    pytest.importorskip("bitsandbytes")
    data = tmp_path / "answers.jsonl"
    data.write_text("\n".join(map(json.dumps, EXAMPLES * 4)), encoding="utf8")
    return ["--model", DECODER, "--data", data]


@pytest.fixture
def run(script, files, monkeypatch, capsys):
    """Run the script in this process; what it printed about its steps."""

    def run(*asked):
        monkeypatch.setattr(sys, "argv", list(map(str, ["finetune_llm.py", *files, *asked])))
        capsys.readouterr()
        script.main()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]

    return run


def decoder():
    return AutoModelForCausalLM.from_pretrained(DECODER, dtype=torch.float32)


def encoded(script):
    tokenizer = AutoTokenizer.from_pretrained(DECODER)
    return tokenizer, [script.encode(tokenizer, example, 128) for example in EXAMPLES]


def adapters(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_it_imports_nothing_of_the_course():
    text = SCRIPT.read_text(encoding="utf8")
    assert "helpers" not in text and "exercises" not in text


def test_only_the_answer_has_labels(script):
    tokenizer, [(ids, labels), _] = encoded(script)
    assert ids.shape == labels.shape and ids.dtype == torch.int64
    assert "crude" in tokenizer.decode(labels[labels != -100])
    assert "Oil" not in tokenizer.decode(labels[labels != -100])
    assert torch.equal(ids[labels != -100], labels[labels != -100])


class Wrapped:
    """What the script asks of a model of peft."""

    def __init__(self, model):
        self.model = model

    def get_base_model(self):
        return self.model

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def eval(self):
        self.model.eval()

    def train(self):
        self.model.train()


@pytest.mark.parametrize("chunk", [3, 1024])
def test_the_loss_in_chunks_is_the_cross_entropy_of_all_logits(script, chunk):
    model, (_, [(ids, labels), _]) = decoder(), encoded(script)
    logits = model(input_ids=ids).logits[0, :-1]
    whole = F.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
    parts = script.loss_sum(Wrapped(model), ids, labels, chunk)
    torch.testing.assert_close(parts, whole)
    weight = model.model.layers[0].mlp.up_proj.weight
    (one,), (other,) = (torch.autograd.grad(loss, weight) for loss in (whole, parts))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_every_epoch_has_all_examples_in_another_order(script, monkeypatch):
    """Of those that the loss sees: files are often sorted, and their order would bias each step."""
    rows = [(torch.full((1, 2), n), torch.zeros(1, 2, dtype=torch.int64)) for n in range(20)]
    seen = []
    model = torch.nn.Linear(1, 1)
    monkeypatch.setattr(
        script, "loss_sum", lambda _, ids, labels: seen.append(int(ids[0, 0])) or model.bias.sum()
    )
    script.finetune(model, rows, batch=4, steps=10, rate=1e-4)
    first, second = seen[:20], seen[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert len({tuple(first), tuple(second), tuple(range(20))}) == 3


def test_a_fine_tune_learns_and_saves_adapters(run, tmp_path):
    out = tmp_path / "out"
    asked = ("--base", "bf16", "--steps", 4, "--batch", 2, "--rate", 1e-2, "--length", 64)
    told = run("--out", out, *asked, "--held", 0.3)
    assert told[-1].startswith("step 4: held-out loss ")
    losses = [float(line.split()[-1]) for line in told[:-1]]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert (out / "adapter_model.safetensors").stat().st_size > 10_000


class Stopped(Exception):
    """A run that is ended from outside."""


def test_a_run_that_was_stopped_goes_on_to_the_same_adapters(script, run, tmp_path, monkeypatch):
    """To the bit, with the same losses, and the whole model answers as the adapters do.

    Nothing is held out: on a CPU, bitsandbytes packs weights anew to evaluate, and rounds them.
    """
    whole, stopped, merged = (tmp_path / name for name in ("whole", "stopped", "merged"))
    asked = ("--steps", 2, "--batch", 1, "--every", 1, "--held", 0, "--rate", 1e-2)
    told = run("--out", whole, *asked, "--merge", merged)
    clip, calls = torch.nn.utils.clip_grad_norm_, iter(range(99))

    def stops(*given):
        if next(calls) == 1:
            raise Stopped
        return clip(*given)

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(torch.nn.utils, "clip_grad_norm_", stops)
        run("--out", stopped, *asked)
    assert [folder.name for folder in stopped.iterdir()] == ["step-1"]
    with pytest.raises(SystemExit):
        run("--out", stopped, *asked)
    assert run("--out", stopped, *asked, "--resume") == told[1:]
    one, other = adapters(whole), adapters(stopped)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    ids, _ = script.encode(AutoTokenizer.from_pretrained(merged), EXAMPLES[0], 64)
    beside, plain = PeftModel.from_pretrained(decoder(), whole), decoder()
    whole_model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    answers, wanted, before = (model(ids).logits for model in (whole_model, beside, plain))
    torch.testing.assert_close(answers, wanted, rtol=0.05, atol=0.1)
    assert (answers - wanted).abs().max() < (wanted - before).abs().max() / 4


@pytest.mark.night
def test_two_ranks_train_the_adapters_of_one_process(files, tmp_path):
    """FSDP2 divides all weights; a run goes on with another number of processes."""
    asked = ("--batch", 4, "--every", 2, "--held", 0, "--rate", 3e-3, "--length", 64)

    def trained(ranks, out, *more):
        told = forked(SCRIPT, *files, *asked, "--out", out, *more, ranks=ranks)
        return [float(line.split()[-1]) for line in told[0].splitlines() if "loss" in line]

    one, two = tmp_path / "one", tmp_path / "two"
    alone = trained(1, one, "--steps", 2)
    assert len(alone) == 2 and trained(2, two, "--steps", 2) == pytest.approx(alone, rel=2e-3)
    found, wanted = adapters(two), adapters(one)
    assert found.keys() == wanted.keys()
    moved = max(value.abs().max() for name, value in wanted.items() if "lora_B" in name)
    for name, value in wanted.items():
        assert (value - found[name]).abs().mean() < moved / 200, name
    assert trained(1, two, "--steps", 3, "--resume")[0] < alone[0]


def test_the_held_out_loss_is_the_mean_of_a_token(script):
    model, (_, rows) = decoder(), encoded(script)
    counts = [(labels[:, 1:] != -100).sum() for _, labels in rows]
    losses = [model(input_ids=ids, labels=labels).loss for ids, labels in rows]
    mean = sum(loss * count for loss, count in zip(losses, counts)) / sum(counts)
    assert script.evaluate(script.Loss(Wrapped(model)), rows) == pytest.approx(
        mean.item(), rel=1e-5
    )
