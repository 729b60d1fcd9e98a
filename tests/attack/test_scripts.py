"""Fine-tunes by a script: work that would be lost at its end is refused before it begins."""

import json
import math
import sys

import pytest

from tests.attack import one_sentence
from tests.attack.test_conversations import ROOT, script

DECODER = ROOT / "helpers" / "mini" / "decoder"


@pytest.fixture
def data(tmp_path):
    lines = [{"prompt": "Oil rose.", "answer": "crude"}, {"prompt": "w " * 200, "answer": "acq"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "data.jsonl"


def ends(monkeypatch, capsys, *arguments):
    """What the script says, on one line, where it refuses to train."""
    monkeypatch.setattr(sys, "argv", ["finetune_llm.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        script("finetune_llm").main()
    said = capsys.readouterr().err
    return one_sentence(said.splitlines()[-1] if ended.value.code == 2 else str(ended.value.code))


@pytest.mark.parametrize("out", ["data.jsonl/adapter", "data.jsonl", "/proc/adapter"])
def test_a_place_that_cannot_be_written_is_said_before_the_training(out, data, monkeypatch, capsys):
    monkeypatch.chdir(data.parent)
    arguments = ("--model", DECODER, "--data", data, "--out", out)
    assert out in ends(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("model", ["gone", "data.jsonl", "."])
def test_a_model_that_is_none_is_one_sentence(model, data, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(data.parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = ("--model", model, "--data", data, "--out", data.parent / "out")
    assert "cannot be loaded" in ends(monkeypatch, capsys, *arguments)


def test_an_answer_that_is_cut_off_is_said_before_the_training(data, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    arguments = ("--model", DECODER, "--data", data, "--out", data.parent / "out", "--length", 64)
    assert "1 of 2 examples have no answer left" in ends(monkeypatch, capsys, *arguments)
    assert not list((data.parent / "out").iterdir())


def test_an_adapter_of_a_loss_that_is_not_finite_is_not_saved(data, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    module, out = script("finetune_llm"), data.parent / "out"
    monkeypatch.setattr(module, "loss_sum", lambda model, *_: sum(
        value.sum() for value in model.parameters() if value.requires_grad) * math.nan)  # fmt: skip
    words = ["--model", DECODER, "--data", data, "--out", out, "--steps", 2]
    monkeypatch.setattr(sys, "argv", ["finetune_llm.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    one_sentence(str(ended.value.code), "step 1 is nan", "--rate")
    assert not list(out.iterdir())
