"""Programs whose model writes before or between its steps, and losses that align two sequences."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.programs.real import steps_of
from tests.script import run, taken
from tight_fit.script import program_report

WRITES = """\
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
name, beams, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
small = {"n_embd": 64, "n_head": 4, "n_positions": 128, "n_layer": 1}
if name == "t5":
    small = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 96, "num_layers": 1}
config = AutoConfig.for_model(name, vocab_size=256, **small)
config.decoder_start_token_id = 0
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = kind.from_config(config).to(device)
model.generation_config.eos_token_id = end if end >= 0 else None
model.generation_config.pad_token_id = 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(4):
    model.eval()
    ids = torch.randint(1, 256, (8, 12), device=device)
    model.generate(ids, num_beams=beams, do_sample=False, max_new_tokens=16)
    model.train()
    one = ids[:1, :4]
    model(input_ids=one, labels=one).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ALIGNS = """\
import torch
from torch import nn
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(64, 32).to(device)
loss = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    heard = torch.rand(200, 8, 64, device=device)
    longest = torch.tensor([5, 9, 12, 60, 7, 8, 30, 3])
    words = torch.randint(1, 32, (8, 60), device=device)
    told = model(heard).log_softmax(-1)
    loss(told, words, torch.full((8,), 200), longest).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
REWARDED = """\
import sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
prompts = Dataset.from_list([{"prompt": "hello"} for _ in range(64)])
longest = []
def reward(completions, completion_ids, **columns):
    longest.append({len(ids) for ids in completion_ids})
    assert longest[-1] == {24}, longest
    return [float(len(text)) for text in completions]
options = {"num_generations": 4, "max_completion_length": 24, "max_steps": 6, "bf16": False}
args = GRPOConfig("out", per_device_train_batch_size=4, report_to="none", **options)
GRPOTrainer(sys.argv[1], reward, args=args, train_dataset=prompts).train()
"""


def both(path: str, planned: tuple[str, ...], real: tuple[str, ...]):
    """(facts of the plan, bytes of its steps, those of a real run), but for the first step."""
    facts = run(path, *planned, gpu=None, seconds=120.0, steps=3)
    return facts, taken(facts)[1:], steps_of(Path(path).resolve(), real, 3, Path.cwd())[1:]


@pytest.mark.parametrize("name, beams", [("gpt2", "4"), ("t5", "1")])
def test_what_is_written_is_as_long_as_it_may_become(name, beams, program):
    """Against a real model that knows no end; the plan knows one, and does not meet it."""
    facts, plan, real = both(program(WRITES), (name, beams, "1"), (name, beams, "-1"))
    assert plan == pytest.approx(real, rel=0.01)
    assert facts["generates"] == "train.py:20"
    assert any("as long as it may become" in note for note in program_report.notes(facts))


def test_a_loss_that_aligns_sequences_is_planned(program):
    _, plan, real = both(program(ALIGNS), (), ())
    assert plan == pytest.approx(real, rel=0.01)


def test_a_step_that_learns_from_rewards_is_planned(tiny, program):
    pytest.importorskip("trl")
    words = AutoTokenizer.from_pretrained(tiny / "gpt2", eos_token="[SEP]", bos_token="[CLS]")
    shutil.copytree(tiny / "gpt2", "model")
    words.save_pretrained("model")
    facts = run(program(REWARDED), "model", seconds=120.0)
    assert facts["fits"] and facts["generates"] == "train.py:12" and len(facts["steps"]) >= 3
