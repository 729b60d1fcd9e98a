"""Small models with weights, in folders as `save_pretrained` writes them, for the programs."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    T5Config,
)

from tests.small import configured

MINI = Path(__file__).parents[2] / "helpers" / "mini" / "deberta"
WORDS = 8192  # of the mini DeBERTa's tokenizer, as the fixture checks
KINDS = {
    "bert": (AutoModelForMaskedLM, configured(BertConfig, 64, 2, 4, 128, WORDS)),
    "gpt2": (
        AutoModelForCausalLM,
        GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    ),
    "t5": (
        AutoModelForSeq2SeqLM,
        T5Config(
            vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        ),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def new_accelerate(monkeypatch):
    """Accelerate keeps the device that a process chose first, and other tests chose the CPU.

    The command plans a program in a process of its own, where nothing was chosen.
    """
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a folder for each of `KINDS`: configuration, weights, tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    for name, (kind, config) in KINDS.items():
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MINI / file, folder / name / file)
    return folder


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A function that writes a program and gives its path, in a folder that is the current one."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("train.py").write_text(text)
        return "train.py"

    return write
