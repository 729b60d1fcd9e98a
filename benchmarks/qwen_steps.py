"""Qwen-7B's published LoRA steps on an A100, traced without values: the only ones in bf16, and what
tells how well the tensor cores of a data-centre GPU are fed.

The model is transformers' Qwen2 of the same sizes. Qwen's own code fuses its norms and rotary
embeddings, so it launches fewer kernels: short steps, which wait for launches, were faster than
planned here.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.initialization import no_init_weights

from helpers.recipe import Recipe
from tight_fit.kernels.op import OPTIMIZER
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.trace.cuda_kernels import CudaKernels

VOCABULARY = 151936
MICRO_BATCHES = 8
FITTED = 4096  # the length whose step "feeding" in constants.json was fitted to


def trace(length: int, layers: int = 32) -> TracedOps:
    """One optimizer step of 8 micro-batches of one row of `length` tokens."""

    def setup():
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=32,
            use_cache=False,
        )
        torch.set_default_dtype(torch.bfloat16)
        try:
            with no_init_weights():
                model = Qwen2ForCausalLM(config).train()
        finally:
            torch.set_default_dtype(torch.float32)
        model.gradient_checkpointing_enable(
            {
                "use_reentrant": False,
                "context_fn": lambda: (
                    nullcontext(),
                    CudaKernels(Recipe(precision="bf16")),
                ),
            }
        )
        inject_adapter_in_model(
            LoraConfig(
                r=64,
                lora_alpha=16,
                lora_dropout=0.05,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"],
            ),
            model,
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ids = torch.zeros(1, length, dtype=torch.long)
        optimizer = torch.optim.AdamW(trained, foreach=True)

        def step():
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids).logits.float()
                loss = F.cross_entropy(
                    logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1)
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()

        return [model], step

    traced = plan_custom_step(setup, mixed=True).operations
    end = next(place for place, (_, phase) in enumerate(traced.order) if phase == OPTIMIZER)
    traced.repeat(0, end, MICRO_BATCHES - 1)
    return traced
