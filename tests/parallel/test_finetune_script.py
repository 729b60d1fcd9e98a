"""scripts/finetune_llm.py, which needs nothing of the course, fine-tunes the mini decoder."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    data.write_text("\n".join(map(json.dumps, EXAMPLES)), encoding="utf8")
    asked = ["--steps", "4", "--batch", "2", "--rate", "1e-2", "--length", "64"]
    files = ["--model", str(DECODER), "--data", str(data), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["finetune_llm.py", *files, *asked])
    script.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size > 10_000


def test_answers_that_are_cut_away_are_refused_in_one_sentence(script, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    data = tmp_path / "answers.jsonl"
    data.write_text(json.dumps(EXAMPLES[0]), encoding="utf8")
    files = ["--model", str(DECODER), "--data", str(data), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["finetune_llm.py", *files, "--length", "3"])
    with pytest.raises(SystemExit, match="larger one"):
        script.main()
