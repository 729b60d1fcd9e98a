"""Conversations, sessions, scripts: texts that answer themselves, damaged records, lost work."""

import dataclasses
import importlib.util
import json
import math
import sys

import pytest
import torch
from transformers import AutoTokenizer

from helpers import train
from helpers.chat import encode_conversations, split_off_answers
from helpers.recipe import Recipe
from tests.attack import one_sentence, refused
from tests.small import ROOT
from tight_fit.checks import IGNORE
from tools.course import session

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


def fit(split):
    return train.fit(RECIPE, train=split, device="cpu", progress=False)


@pytest.mark.parametrize("name, change", COLUMNS.values(), ids=COLUMNS)
def test_conversations_that_the_model_cannot_learn(name, change):
    split = train.encoded(RECIPE)["train"]
    columns = {**split.columns, name: change(split.columns[name])}
    refused(ValueError, [], lambda: fit(dataclasses.replace(split, columns=columns)))


def test_lengths_are_those_of_the_columns():
    split = train.encoded(RECIPE)["train"]
    for count in (0, -1, 65, 10**6):
        wrong = dataclasses.replace(split, lengths=torch.full_like(split.lengths, count))
        refused(ValueError, "from 1 to 64 tokens", lambda wrong=wrong: fit(wrong))


# -- what a session wrote

CONTENTS = {
    "empty": b"", "binary": b"\x93" * 99, "utf-16": "{}".encode("utf-16"), "an object": b"{}",
    "a list": b"[]", "null": b"null", "half": b'{"steps": [', "deep": b"[" * 100_000,
    "html": b"<html>",
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_is_no_record_is_kept_nowhere(content, tmp_path):
    results = tmp_path / "results"
    for name in ("a.json", "steps/a.json", "steps/a.unfinished", "models/a.json"):
        file = tmp_path / name.replace("/", "-") / name
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        folder = tmp_path / name.replace("/", "-")
        refused(ValueError, file.name, lambda folder=folder: session.keep(folder, results))
    assert not results.exists()


def test_a_folder_without_results_is_said(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name in ("gone", "file", "empty"):
        refused(
            ValueError,
            "holds no result",
            lambda name=name: session.keep(tmp_path / name, tmp_path / "out"),
        )


# -- scripts


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ends(capsys, monkeypatch):
    """What a script says, on one line, where it refuses its arguments or to train."""

    def end(name, *arguments, **replaced):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        module = script(name)
        for part, value in replaced.items():
            monkeypatch.setattr(module, part, value)
        with pytest.raises(SystemExit) as ended:
            module.main()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        if ended.value.code == 2:  # where Python's own words end without a full stop
            return said.splitlines()[-1]
        return one_sentence(str(ended.value.code))

    return end


RANKS = ("ddp", "fsdp", "pipeline", "tensor_parallel")
NO_COUNTS = ("0", "-1", "x")
OF_SCRIPTS = [
    *((name, ["--steps", n], "--steps") for name in RANKS for n in NO_COUNTS),
    *((name, ["--batch-size", n], "--batch-size") for name in RANKS for n in ("1298", *NO_COUNTS)),
    *(("pipeline", ["--micro-batches", n], "divide") for n in ("0", "-1", "3", "64")),
    ("pipeline", ["--schedule", "zigzag"], "invalid choice"),
    ("fsdp", ["--resume", "nowhere"], "holds no checkpoint"),
    ("fsdp", ["--resume", "."], "holds no checkpoint"),
    ("fsdp", ["--save", __file__], "is a file"),
    *((name, [], "start it with torchrun")
      for name in (*RANKS, "context_parallel", "expert_parallel")),
    ("cluster", ["--folder", "."], "start it with torchrun"),
]  # fmt: skip


@pytest.mark.parametrize("name, arguments, says", OF_SCRIPTS)
def test_arguments_of_ranks(name, arguments, says, ends, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert says in ends(name, *arguments)


PAIR = b'{"prompt": "a", "answer": "b"}\n'
DATA = {
    "empty": (b"", "no examples"),
    "no json": (b"oil,crude\n", "line 1"),
    "a list": (b"[]\n", "line 1"),
    "no answer": (b'{"prompt": "a"}\n', "line 1"),
    "an empty answer": (b'{"prompt": "a", "answer": ""}\n', "line 1"),
    "null": (b'{"prompt": null, "answer": "b"}\n', "line 1"),
    "half": (PAIR + PAIR[:13], "line 2"),
    "utf-16": (PAIR.decode().encode("utf-16"), "cannot be used"),
    "binary": (b"\x93" * 99, "cannot be used"),
}


@pytest.mark.parametrize("content, says", DATA.values(), ids=DATA)
def test_data_of_a_fine_tune(content, says, tmp_path, ends):
    (tmp_path / "x.jsonl").write_bytes(content)
    assert says in ends("finetune_llm", "--model", "nowhere", "--data", tmp_path / "x.jsonl")


OF_A_FINE_TUNE = [
    *([f"--{name}", n] for name in ("length", "rank", "batch", "steps", "every") for n in "0x"),
    *([f"--rate={n}"] for n in ("0", "-1", "nan", "inf", "1", "x")),
    *(["--out", out] for out in (__file__, f"{__file__}/x", "/proc/adapter")),
    ["--merge", __file__],
    ["--held", "1"],
]


@pytest.mark.parametrize("arguments", OF_A_FINE_TUNE, ids="".join)
def test_arguments_of_a_fine_tune(arguments, ends, tmp_path):
    """They are refused before the model, which is nowhere, is asked for."""
    (tmp_path / "x.jsonl").write_bytes(PAIR)
    said = ends("finetune_llm", "--model", "nowhere", "--data", tmp_path / "x.jsonl", *arguments)
    says = arguments[1] if arguments[0] in ("--out", "--merge") else arguments[0].split("=")[0]
    assert says in said


# Work that would be lost at its end is refused before it begins.


@pytest.fixture
def tuned(ends, tmp_path):
    """What finetune_llm says of the small decoder and two examples; nothing is written."""
    pytest.importorskip("bitsandbytes")
    lines = [{"prompt": "Oil rose.", "answer": "crude"}, {"prompt": "w " * 200, "answer": "acq"}]
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("\n".join(map(json.dumps, lines)))

    def tune(*arguments, model=ROOT / "helpers" / "mini" / "decoder", **replaced):
        words = ["--model", model, "--data", data, "--out", out, *arguments]
        said = ends("finetune_llm", *words, **replaced)
        assert not out.exists() or not list(out.iterdir())
        return said

    return tune


@pytest.mark.parametrize("model", ["gone", __file__, str(ROOT)])
def test_a_model_that_is_none_is_one_sentence(model, tuned, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "cannot be loaded" in tuned(model=model)


def test_an_answer_that_is_cut_off_is_said_before_the_training(tuned):
    assert "1 of 2 examples have no answer left" in tuned("--length", 64)


def test_an_adapter_of_a_loss_that_is_not_finite_is_not_saved(tuned):
    def no_number(model, *_):
        trained = (value for value in model.parameters() if value.requires_grad)
        return sum(value.sum() for value in trained) * math.nan

    said = tuned("--steps", 2, loss_sum=no_number)
    assert "step 1 is nan" in said and "--rate" in said
