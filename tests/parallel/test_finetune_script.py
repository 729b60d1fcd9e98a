"""scripts/finetune_llm.py, which needs nothing of the course, fine-tunes the mini decoder."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.forked import forked

ROOT = Path(__file__).resolve().parent.parent.parent
DECODER = ROOT / "helpers" / "mini" / "decoder"
EXAMPLES = [
    {"prompt": "Oil prices rose sharply today.", "answer": "crude"},
    {"prompt": "The company was bought.", "answer": "acq"},
]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("finetune_llm", ROOT / "scripts/finetune_llm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_imports_nothing_of_the_course():
    text = (ROOT / "scripts/finetune_llm.py").read_text(encoding="utf8")
    assert "helpers" not in text and "exercises" not in text


def test_only_the_answer_has_labels(script):
    tokenizer = AutoTokenizer.from_pretrained(DECODER)
    ids, labels = script.encode(tokenizer, EXAMPLES[0], 128)
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
    model = AutoModelForCausalLM.from_pretrained(DECODER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DECODER)
    ids, labels = script.encode(tokenizer, EXAMPLES[0], 128)
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


def test_a_fine_tune_learns_and_saves_adapters(script, tmp_path, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    data = tmp_path / "answers.jsonl"
    data.write_text("\n".join(map(json.dumps, EXAMPLES * 2)), encoding="utf8")
    asked = ["--steps", "4", "--batch", "2", "--rate", "1e-2", "--length", "64", "--held", "0.3"]
    files = ["--model", str(DECODER), "--data", str(data), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["finetune_llm.py", *files, *asked])
    script.main()
    told = steps_of(capsys)
    assert told[-1].startswith("step 4: held-out loss ")
    losses = [float(line.split()[-1]) for line in told[:-1]]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size > 10_000


def steps_of(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]


class Stopped(Exception):
    """A run that is ended from outside."""


def test_a_run_that_was_stopped_goes_on_to_the_same_adapters(script, tmp_path, monkeypatch, capsys):
    """To the bit, with the same losses, and the whole model answers as the adapters do.

    Nothing is held out: on a CPU, bitsandbytes packs weights anew to evaluate, and rounds them.
    """
    pytest.importorskip("bitsandbytes")
    data, out = tmp_path / "answers.jsonl", [tmp_path / "whole", tmp_path / "stopped"]
    data.write_text("\n".join(map(json.dumps, EXAMPLES * 4)), encoding="utf8")
    asked = ["--steps", "2", "--batch", "1", "--every", "1", "--held", "0", "--rate", "1e-2"]

    def run(folder, *more):
        files = ["--model", str(DECODER), "--data", str(data), "--out", str(folder)]
        monkeypatch.setattr(sys, "argv", ["finetune_llm.py", *files, *asked, *more])
        script.main()

    run(out[0], "--merge", str(tmp_path / "merged"))
    told = steps_of(capsys)
    clip = torch.nn.utils.clip_grad_norm_
    calls = iter(range(99))

    def stops(*given):
        if next(calls) == 1:
            raise Stopped
        return clip(*given)

    with monkeypatch.context() as stopped, pytest.raises(Stopped):
        stopped.setattr(torch.nn.utils, "clip_grad_norm_", stops)
        run(out[1])
    assert [folder.name for folder in out[1].iterdir()] == ["step-1"]
    with pytest.raises(SystemExit):
        run(out[1])
    capsys.readouterr()
    run(out[1], "--resume")
    assert steps_of(capsys) == told[1:]
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in out)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(DECODER, dtype=torch.float32)
    beside = PeftModel.from_pretrained(base, out[0])
    ids, _ = script.encode(AutoTokenizer.from_pretrained(tmp_path / "merged"), EXAMPLES[0], 64)
    torch.testing.assert_close(merged(ids).logits, beside(ids).logits, rtol=0.05, atol=0.1)
    plain = AutoModelForCausalLM.from_pretrained(DECODER, dtype=torch.float32)
    moved = (beside(ids).logits - plain(ids).logits).abs().max()
    assert (merged(ids).logits - beside(ids).logits).abs().max() < moved / 4


@pytest.mark.parametrize("base", ["nf4", pytest.param("bf16", marks=pytest.mark.night)])
def test_two_ranks_train_the_adapters_of_one_process(tmp_path, base):
    """FSDP2 divides all weights; a run goes on with another number of processes."""
    pytest.importorskip("bitsandbytes")
    data = tmp_path / "answers.jsonl"
    data.write_text("\n".join(map(json.dumps, EXAMPLES * 4)), encoding="utf8")
    asked = ["--batch", "4", "--every", "2", "--held", "0", "--rate", "3e-3", "--base", base]
    asked += ["--model", DECODER, "--data", data]

    def run(ranks, folder, *more):
        out = ["--out", tmp_path / folder]
        told = forked(ROOT / "scripts/finetune_llm.py", *asked, *out, *more, ranks=ranks)
        return [float(line.split()[-1]) for line in told[0].splitlines() if "loss" in line]

    alone = run(1, "one", "--steps", "4")
    together = run(2, "two", "--steps", "4")
    assert len(alone) == 4 and together == pytest.approx(alone, rel=2e-3)
    one, other = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("one", "two")
    )
    assert one.keys() == other.keys()
    moved = max(value.abs().max() for name, value in one.items() if "lora_B" in name)
    for name, value in one.items():
        assert (value - other[name]).abs().mean() < moved / 200, name
    assert run(1, "two", "--steps", "6", "--resume")[0] < alone[0]


def test_the_held_out_loss_is_the_mean_of_a_token(script):
    model = AutoModelForCausalLM.from_pretrained(DECODER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DECODER)
    rows = [script.encode(tokenizer, example, 128) for example in EXAMPLES]
    wrapped = Wrapped(model)
    losses = [
        model(input_ids=ids, labels=labels).loss * (labels[:, 1:] != -100).sum()
        for ids, labels in rows
    ]
    tokens = sum((labels[:, 1:] != -100).sum() for _, labels in rows)
    assert script.evaluate(script.Loss(wrapped), rows) == pytest.approx(
        (sum(losses) / tokens).item(), rel=1e-5
    )
