"""Single published figures: DDP, Trainer, two operations.

- PyTorch's recipe of ZeroRedundancyOptimizer (pytorch/tutorials, commit 01c6302, PyTorch 1.8):
  20 linear layers under DistributedDataParallel of two ranks, max_memory_allocated in MB (10⁶,
  rounded down) before and after the first step of Adam. The GPU is not stated.
- optimum-benchmark's report of RoBERTa for multiple choice (optimum-benchmark/cuda on the hub,
  commits a5d451b and e9b5a49, 2024, its PyTorch between 2.3 and 2.6): Trainer on an A10, fp32, two
  examples of one choice with 16 tokens, as in `benchmarks.peaks.known`.
- Liger-Kernel's benchmarks (benchmark/data/a100_all_benchmark_data.csv, commit bdbfead, January
  2025, its PyTorch not stated): forward and backward pass of transformers' RMSNorm and of PyTorch's
  cross entropy on an A100, in MiB; of each the row of the greatest size. Rows of swiglu and geglu
  are left out, as they hold what earlier rows of the same process had left behind: from 1,024 to
  2,048 tokens they grow by less than from 2,048 to 4,096.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import RobertaConfig, RobertaForMultipleChoice
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.peaks.point import Setup
from tight_fit.techniques import model_changes


def roberta() -> tuple[list, object]:
    """Trainer's default step: gradients are clipped, and given up after the update."""
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    with model_changes.quiet():
        model = RobertaForMultipleChoice(config).cuda().train()
    groups = [
        [value for value in model.parameters() if (value.dim() > 1) == matrix]
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=5e-5, weight_decay=0)
    ids, labels = torch.zeros(2, 1, 16, dtype=torch.long), torch.zeros(2, dtype=torch.long)

    def step():
        inputs = {"input_ids": ids.cuda(), "attention_mask": torch.ones_like(ids).cuda()}
        model(**inputs, labels=labels.cuda()).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    return [model], step


def rms_norm() -> tuple[list, object]:
    """transformers' RMSNorm of 2,048 rows of 32,768 bf16 elements; its weight is in fp32."""
    norm = LlamaRMSNorm(32768, 1e-6).cuda()
    x = torch.zeros(2048, 32768, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    gradient = torch.zeros_like(x)

    def step():
        norm(x).backward(gradient, retain_graph=True)

    return [norm, x, gradient], step


def cross_entropy() -> tuple[list, object]:
    """PyTorch's cross entropy of 16,384 rows of 131,072 fp32 logits."""
    logits = torch.zeros(16384, 131072, device="cuda", requires_grad=True)
    labels = torch.zeros(16384, dtype=torch.long, device="cuda")
    loss = nn.CrossEntropyLoss()

    def step():
        loss(logits, labels).backward(retain_graph=True)

    return [logits, labels], step


def linear_layers(update: bool) -> Setup:
    """The recipe's first step, with the update by Adam or without."""

    def make():
        model = nn.Sequential(*(nn.Linear(2000, 2000).to("cuda") for _ in range(20)))
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)

        def step():
            outputs = parallel(torch.zeros(20, 2000).to("cuda"))
            labels = torch.zeros(20, 2000).to("cuda")
            nn.MSELoss()(outputs, labels).backward()
            if update:
                optimizer.step()

        return [model], step

    return make
