"""What the programs read: small models with weights, tokenizers and data sets under public names.

A program that asks the hub for "bert-base-cased" or "trl-lib/Capybara" finds a folder of that name
where it runs. All is made here from numbers and made-up words. All examples of a data set have the
same length, so that the order in which a run shuffles them does not change its memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertTokenizerFast,
    LlamaConfig,
    Qwen2Config,
    Qwen2Tokenizer,
)

from benchmarks.pages import DATA

SOUNDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in "aeiou"]
WORDS = [f"{one}{two}" for one in SOUNDS for two in SOUNDS][:900]
BERT_MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHAT_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
MODULES = ".modules"  # folder for HF_MODULES_CACHE
ROWS = 160  # examples of a data set
METRIC = (DATA / "metric.txt").read_text(encoding="utf8")  # what `evaluate` loads


def write(folder: Path) -> None:
    """Write everything that the programs read into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    _models(folder)
    random = Random(0)
    pairs = lambda: {"sentence1": text(random, 14), "sentence2": text(random, 11)}  # noqa: E731
    for name in ("glue", "nyu-mll/glue"):
        _data(folder / name, "mrpc", lambda row: {**pairs(), "label": row % 2, "idx": row})
    _data(folder / "imdb", "plain_text", lambda row: {"text": text(random, 62), "label": row % 2})
    _data(
        folder / "Salesforce/wikitext", "wikitext-2-v1", lambda row: {"text": text(random, 12)}, 512
    )
    _data(folder / "trl-lib/Capybara", "default", lambda row: {"messages": chat(random, 10)})
    for name in ("trl-lib/ultrafeedback_binarized", "trl-lib/kto-mix-14k"):
        made = _preferred if "binarized" in name else _judged
        _data(folder / name, "default", lambda row, made=made: made(random, row))
    rows = [f"{text(random, 24)},{row % 3}" for row in range(ROWS)]
    for name in ("train", "validation"):
        (folder / f"{name}.csv").write_text("\n".join(["sentence,label", *rows]) + "\n")
        (folder / f"{name}.txt").write_text("\n".join(text(random, 40) for _ in range(ROWS)) + "\n")
    for name in ("accuracy", "glue"):  # where `evaluate` looks for what it has loaded before
        place = (
            folder / MODULES / "evaluate_modules/metrics" / f"evaluate-metric--{name}" / ("0" * 64)
        )
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.py").write_text(METRIC)
    names = folder / "names"
    names.mkdir(exist_ok=True)
    for language in range(6):
        lines = "\n".join("".join(random.choices("abcdefgh", k=9)) for _ in range(200))
        (names / f"Language{language}.txt").write_text(lines + "\n")


def text(random: Random, words: int) -> str:
    """So many words of four letters: one token each for BERT, one for each letter elsewhere."""
    return " ".join(random.choices(WORDS, k=words))


def chat(random: Random, words: int) -> list[dict[str, str]]:
    """A question and an answer."""
    return [
        {"role": "user", "content": text(random, words)},
        {"role": "assistant", "content": text(random, words)},
    ]


def _preferred(random: Random, row: int) -> dict[str, Any]:
    asked, better = chat(random, 8)
    worse = {"role": "assistant", "content": text(random, 8)}
    return {"chosen": [asked, better], "rejected": [asked, worse]}


def _judged(random: Random, row: int) -> dict[str, Any]:
    asked, answer = chat(random, 8)
    return {"prompt": [asked], "completion": [answer], "label": row % 2 == 0}


def _data(folder: Path, name: str, row: Callable[[int], dict[str, Any]], rows: int = ROWS) -> None:
    """A data set with one configuration and three splits, as the hub lays them out."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = ("train", "validation", "test")
    for split in splits:
        lines = (json.dumps(row(number)) for number in range(rows))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    files = "\n".join(f"  - split: {split}\n    path: {split}.jsonl" for split in splits)
    head = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}\n---\n"
    (folder / "README.md").write_text(head)


def _models(folder: Path) -> None:
    """The models, each in a folder as `save_pretrained` writes it."""
    torch.manual_seed(0)
    vocabulary = {word: number for number, word in enumerate(BERT_MARKS + WORDS)}
    there = folder / "bert-base-cased"
    there.mkdir(exist_ok=True)
    (there / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    bert = BertTokenizerFast(vocab=vocabulary, do_lower_case=False, model_max_length=64)
    bert.save_pretrained(there)
    size = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    vocabulary_size = 1024
    AutoModelForMaskedLM.from_config(
        BertConfig(vocab_size=vocabulary_size, max_position_embeddings=128, **size)
    ).save_pretrained(there)
    for name, config in _decoders(vocabulary_size, size):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        _chat_tokenizer().save_pretrained(folder / name)


def _decoders(vocabulary: int, size: dict[str, int]) -> Iterator[tuple[str, Any]]:
    marks = {
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 256,
    }
    size = {**size, "num_key_value_heads": 2, "vocab_size": vocabulary}
    yield "HuggingFaceTB/SmolLM-360M", LlamaConfig(**size, **marks)
    yield "Qwen/Qwen2-0.5B", Qwen2Config(**size, **marks)
    yield "Qwen/Qwen2-0.5B-Instruct", Qwen2Config(**size, **marks)


def _chat_tokenizer() -> Qwen2Tokenizer:
    """One token for each letter."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {mark: number for number, mark in enumerate(CHAT_MARKS + letters)}
    made = Qwen2Tokenizer(vocab=vocabulary, eos_token="<|im_end|>", model_max_length=128)
    made.add_special_tokens({"additional_special_tokens": CHAT_MARKS})
    made.chat_template = CHAT
    return made
