"""Mixtures of experts of transformers, in each of its ways to compute them, as in programs."""

import pytest

from benchmarks.programs.real import steps_of
from tests.script import run, taken
from tight_fit.script import program_report

PROGRAM = """\
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
name, experts, balanced = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
count = {"num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 96}
config = AutoConfig.for_model(name, vocab_size=512, **sizes, **heads, **count)
model = AutoModelForCausalLM.from_config(config, experts_implementation=experts).to(device)
model.train()
def even(module, args, kwargs):  # what the plan takes for granted, said to a real router
    hidden, chosen, *rest = args
    return (hidden, (torch.arange(chosen.numel()) % 8).view_as(chosen), *rest), kwargs
for layer in model.model.layers if balanced == "balanced" else ():
    layer.mlp.experts.register_forward_pre_hook(even, with_kwargs=True)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    ids = torch.randint(0, 512, (4, 32), device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CASES = [
    ("mixtral", "eager"),
    ("qwen3_moe", "grouped_mm"),
    ("gpt_oss", "eager"),
    ("gpt_oss", "grouped_mm"),
]


@pytest.mark.parametrize("kind, experts", CASES)
def test_their_bytes_are_those_of_a_real_run(kind, experts, program, tmp_path):
    """The plan knows no router, and says so; the real one is told to send each expert as many."""
    path = program(PROGRAM)
    facts = run(path, kind, experts, "by the router", gpu=None, steps=3)
    plan = taken(facts)
    real = steps_of(tmp_path / path, (kind, experts, "balanced"), 3, tmp_path)
    assert plan[1:] == pytest.approx(real[1:], rel=0.002) and min(plan) > 900_000
    told = [note for note in program_report.notes(facts) if "router" in note]
    assert len(told) == (experts == "eager")
    assert all("as many as any other, at train.py:20" in note for note in told)


def test_experts_in_one_product_for_all_are_planned_for_a_gpu(program):
    facts = run(program(PROGRAM), "gpt_oss", "batched_mm", "by the router", gpu="A100-40GB")
    assert facts["fits"] and facts["at_peak"]["activations"]
