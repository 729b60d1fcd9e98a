"""What loading weights takes of the host, as an answer says it, against a model that is loaded."""

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.small import configured
from tight_fit.command.notes import of_loading
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model_step

CONFIG = configured(LlamaConfig, 512, 8, 8, 2048, 32000, dtype="bfloat16")
LOADS = """
import sys, torch
from transformers import LlamaForCausalLM
LlamaForCausalLM
def own():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
before = own()
model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
print(own() - before)
"""
NOISE = 32 << 20  # bytes of modules that are imported meanwhile


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype, weights", [("bfloat16", "bf16"), ("float32", "fp32")])
def test_another_dtype_is_made_on_the_host_and_the_stored_one_is_mapped(dtype, weights, tmp_path):
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    command = [sys.executable, "-c", LOADS, str(tmp_path), dtype]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(taken - (0 if weights == "bf16" else 4 * count)) < NOISE


@pytest.mark.parametrize("weights, said", [("bf16", False), ("fp32", True)])
def test_the_answer_says_so_of_large_models(weights, said):
    config = LlamaConfig(num_hidden_layers=4, vocab_size=32000, dtype="bfloat16")
    step = ModelStep(config, batch_size=1, length=8, weights=weights, task="causal-lm")
    plan = plan_model_step(step)
    sentences = of_loading(step, plan)
    assert bool(sentences) == said
    assert not said or f"{4 * plan.parameters / 2**30:.2f} GiB" in sentences[0]
