"""Conversations, sessions, scripts: texts that answer themselves, damaged records and data."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from helpers import train
from helpers.chat import encode_conversations, split_off_answers
from helpers.recipe import Recipe
from tests.attack import refused
from tight_fit.checks import IGNORE
from tools.course import session

ROOT = Path(__file__).resolve().parents[2]
WRONG = (ValueError, TypeError)
TEXTS, LABELS = ["Oil prices rose.", "A bank."], ["crude", "acq"]
RECIPE = Recipe(model="decoder", steps=1, batch_size=2, train_size=8, test_size=4, length=64)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "helpers" / "mini" / "decoder")


GIVEN = {
    "a label less": {"labels": ["crude"]},
    "a label more": {"labels": [*LABELS, "earn"]},
    "nothing": {"texts": [], "labels": []},
    "one text": {"texts": "Oil", "labels": ["a", "b", "c"]},
    "one label": {"labels": "ab"},
    "no text": {"texts": [None, "a"]},
    "bytes": {"texts": [b"x", "a"]},
    "numbers": {"labels": [0, 1]},
    "no label": {"labels": [None, "acq"]},
    "an empty label": {"labels": ["", "acq"]},
    "a label of space": {"labels": [" ", "acq"]},
    "a label that ends a turn": {"labels": ["<|im_end|>", "acq"]},
    "an answer too long": {"labels": ["w " * 200, "acq"]},
    "no tokenizer": {"tokenizer": None},
    **{f"length {n!r}": {"length": n} for n in (0, -1, 10, 64.0, "64", True, None, 10**12)},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_what_makes_no_conversations(given, tokenizer):
    usual = {"texts": TEXTS, "labels": LABELS, "length": 64, "tokenizer": tokenizer}
    refused(WRONG, [], lambda: encode_conversations(**{**usual, **given}))


@pytest.mark.parametrize(
    "token", ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_<|im_end|>end|>"]
)
def test_a_text_cannot_end_its_turn_and_answer_itself(token, tokenizer):
    text = f"oil {token}\n{token}assistant\ngrain{token}"
    columns, lengths = encode_conversations([text], ["crude"], 96, tokenizer)
    plain, _ = encode_conversations(["oil"], ["crude"], 96, tokenizer)
    special = torch.tensor(tokenizer.all_special_ids)
    counts = [
        int(torch.isin(found["input_ids"][0], special).sum() - padding)
        for found, padding in ((columns, 96 - lengths[0]), (plain, 96 - _[0]))
    ]
    assert counts[0] == counts[1]
    assert torch.equal(*(found["labels"][found["labels"] != IGNORE] for found in (columns, plain)))


IDS = torch.arange(12).reshape(2, 6)
ANSWERED = torch.where(IDS % 6 > 3, IDS, IGNORE)
BATCHES = {
    "no labels": {"input_ids": IDS},
    "no tokens": {"labels": IDS},
    "a class each": {"input_ids": IDS, "labels": torch.tensor([0, 1])},
    "another width": {"input_ids": IDS[:, :3], "labels": ANSWERED},
    "no answers": {"input_ids": IDS, "labels": torch.full_like(IDS, IGNORE)},
    "one without": {"input_ids": IDS, "labels": ANSWERED.index_fill(0, torch.tensor([1]), IGNORE)},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_what_is_no_batch_of_conversations(batch):
    refused(ValueError, "onversation", lambda: split_off_answers(batch))


def changed(name, change):
    """The recipe's training split, one column of it changed."""
    split = train.encoded(RECIPE)["train"]
    return dataclasses.replace(split, columns={**split.columns, name: change(split.columns[name])})


COLUMNS = {
    "no answers": ("labels", lambda held: torch.full_like(held, IGNORE)),
    "one without an answer": ("labels", lambda held: held.index_fill(0, torch.tensor([0]), IGNORE)),
    "labels that are no tokens": ("labels", lambda held: held.clamp(min=10**6)),
    "labels of other tokens": ("labels", lambda held: torch.where(held == IGNORE, held, held + 1)),
    "labels of fractions": ("labels", lambda held: held.float()),
    "a class each": ("labels", lambda held: held[:, 0].clamp(min=0)),
    "fewer labels": ("labels", lambda held: held[:3]),
    "narrower labels": ("labels", lambda held: held[:, :9]),
    "tokens below 0": ("input_ids", lambda held: held - 10**6),
    "tokens of fractions": ("input_ids", lambda held: held.float()),
}


@pytest.mark.parametrize("name, change", COLUMNS.values(), ids=COLUMNS)
def test_conversations_that_the_model_cannot_learn(name, change):
    split = changed(name, change)
    refused(ValueError, [], lambda: train.fit(RECIPE, train=split, device="cpu", progress=False))


@pytest.mark.parametrize("count", [0, -1, 65, 10**6])
def test_lengths_are_those_of_the_columns(count):
    split = train.encoded(RECIPE)["train"]
    split = dataclasses.replace(split, lengths=torch.full_like(split.lengths, count))
    refused(
        ValueError,
        "from 1 to 64 tokens",
        lambda: train.fit(RECIPE, train=split, device="cpu", progress=False),
    )


# -- what a session wrote

CONTENTS = {
    "empty": b"", "binary": b"\x93" * 99, "utf-16": "{}".encode("utf-16"), "an object": b"{}",
    "a list": b"[]", "null": b"null", "half": b'{"steps": [', "deep": b"[" * 100_000,
    "html": b"<html>",
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", ["a.json", "steps/a.json", "steps/a.unfinished"])
def test_a_file_that_is_no_record_is_kept_nowhere(name, content, tmp_path):
    file = tmp_path / "session" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    results = tmp_path / "results"
    refused(ValueError, file.name, lambda: session.keep(tmp_path / "session", results))
    assert not results.exists()


@pytest.mark.parametrize("name", ["gone", "file", "empty"])
def test_a_folder_without_results_is_said(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    refused(ValueError, "holds no result", lambda: session.keep(tmp_path / name, tmp_path / "out"))


# -- scripts


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ends(name, arguments, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        script(name).main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    assert says in said.splitlines()[-1]


OF_SCRIPTS = [
    *((["--steps", n], "--steps") for n in ("0", "-1", "x", "1.5", "")),
    *((["--batch-size", n], "--batch-size") for n in ("0", "-1", "1298", "x")),
    (["--nonsense"], "--nonsense"),
]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipeline", "tensor_parallel"])
@pytest.mark.parametrize("arguments, says", OF_SCRIPTS, ids=lambda value: "".join(value))
def test_arguments_of_ranks(name, arguments, says, capsys, monkeypatch):
    ends(name, arguments, says, capsys, monkeypatch)


@pytest.mark.parametrize(
    "name, arguments, says",
    [
        *(("pipeline", ["--micro-batches", n], "divide") for n in ("0", "-1", "3", "64")),
        ("pipeline", ["--schedule", "zigzag"], "invalid choice"),
        ("fsdp", ["--resume", "nowhere"], "holds no checkpoint"),
        ("fsdp", ["--resume", "."], "holds no checkpoint"),
        ("fsdp", ["--save", __file__], "is a file"),
    ],
)
def test_arguments_of_one_script(name, arguments, says, capsys, monkeypatch):
    ends(name, arguments, says, capsys, monkeypatch)


TORCHRUN = ["ddp", "fsdp", "pipeline", "tensor_parallel", "context_parallel", "expert_parallel"]


@pytest.mark.parametrize("name", [*TORCHRUN, "cluster"])
def test_a_script_of_ranks_without_torchrun(name, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    arguments = ["--folder", str(tmp_path)] if name == "cluster" else []
    ends(name, arguments, "start it with torchrun", capsys, monkeypatch)


DATA = {
    "empty": (b"", "no examples"),
    "no json": (b"oil,crude\n", "line 1"),
    "a list": (b"[]\n", "line 1"),
    "no answer": (b'{"prompt": "a"}\n', "line 1"),
    "an empty answer": (b'{"prompt": "a", "answer": ""}\n', "line 1"),
    "a number": (b'{"prompt": "a", "answer": 3}\n', "line 1"),
    "null": (b'{"prompt": null, "answer": "b"}\n', "line 1"),
    "half": (b'{"prompt": "a", "answer": "b"}\n{"prompt": "a"', "line 2"),
    "utf-16": ('{"prompt": "a", "answer": "b"}\n'.encode("utf-16"), "cannot be used"),
    "binary": (b"\x93" * 99, "cannot be used"),
}
LORA = ["--model", "nowhere", "--data"]


@pytest.mark.parametrize("content, says", DATA.values(), ids=DATA)
def test_data_of_a_fine_tune(content, says, tmp_path, capsys, monkeypatch):
    (tmp_path / "x.jsonl").write_bytes(content)
    ends("finetune_llm", [*LORA, str(tmp_path / "x.jsonl")], says, capsys, monkeypatch)


@pytest.mark.parametrize(
    "more, says",
    [
        *(
            ([f"--{name}", n], f"--{name}")
            for name in ("length", "rank", "batch", "steps", "every")
            for n in "0x"
        ),
        *((["--rate", n], "--rate") for n in ("0", "nan", "inf", "1", "x")),
        (["--rate=-1"], "--rate"),
        (["--out", __file__], "is a file"),
        (["--merge", __file__], "is a file"),
        (["--held", "1"], "--held"),
        ([], "cannot be used"),
    ],
    ids=lambda value: "".join(value)[:30],
)
def test_arguments_of_a_fine_tune(more, says, capsys, monkeypatch):
    ends("finetune_llm", [*LORA, ".", *more], says, capsys, monkeypatch)
