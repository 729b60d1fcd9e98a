"""What an answer says of the host: loading weights, and states that the driver moves."""

import sys
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.small import configured, python
from tight_fit.command import notes
from tight_fit.gpus import GPU
from tight_fit.gpus.specs import find_gpu
from tight_fit.kernels.host_memory import link_rate
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model_step
from tight_fit.units import duration, size

LOADS = """
import sys, torch
from transformers import LlamaForCausalLM
LlamaForCausalLM
def own():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
for dtype in (torch.bfloat16, torch.float32):
    before = own()
    model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
    print(own() - before)
"""
NOISE = 32 << 20  # bytes of modules that are imported meanwhile


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_another_dtype_is_made_on_the_host_and_the_stored_one_is_mapped(tmp_path):
    config = configured(LlamaConfig, 512, 8, 8, 2048, 32000, dtype="bfloat16")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    mapped, made = map(int, python("-c", LOADS, tmp_path, check=True).stdout.split())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(mapped) < NOISE and abs(made - 4 * count) < NOISE


@pytest.mark.parametrize("weights, said", [("bf16", False), ("fp32", True)])
def test_the_answer_says_so_of_large_models(weights, said):
    config = LlamaConfig(num_hidden_layers=4, vocab_size=32000, dtype="bfloat16")
    step = ModelStep(config, batch_size=1, length=8, weights=weights, task="causal-lm")
    plan = plan_model_step(step)
    sentences = notes.of_loading(step, plan)
    assert bool(sentences) == said
    assert not said or f"{4 * plan.parameters / 2**30:.2f} GiB" in sentences[0]


def test_an_answer_says_where_paged_states_lie_and_what_moving_them_takes():
    """bitsandbytes waits for each update: all that finds no room is copied in and out, unhidden."""
    config = configured(LlamaConfig, 512, 2, 4, 1024, 4000)
    step = ModelStep(config, 2, 64, optimizer="paged_adamw8bit")
    planned = plan_model_step(step)
    assert planned.host > 2**22
    need = 2**30

    def said(room, step=step):
        gpu = GPU("T4", need + room, (7, 5))
        return [one for one in notes.of_plan(step, planned, gpu, need) if "paged states" in one]

    (roomy,), (full,), (half,) = said(planned.host), said(0), said(planned.host // 2)
    assert "nothing is moved" in roomy and size(planned.host) in roomy
    rate = link_rate(find_gpu("T4"))
    took = duration(2 * planned.host / rate)
    assert f"takes {took} to {took} more" in full
    assert f"takes {duration(planned.host / rate)} to {took} more" in half
    assert not said(-1)  # the step does not fit
    assert not said(planned.host, replace(step, optimizer="adamw8bit"))
