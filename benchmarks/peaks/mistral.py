"""Mistral-7B on one A100, as fms-acceleration's benchmark fine-tuned it: allocated memory.

foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv (commit 04702cc):
peak_torch_mem_alloc_in_bytes, which Trainer reads from torch.cuda.max_memory_allocated, over 20
steps of 4 or 8 examples that are packed to 4,096 tokens. All rows of this model on one GPU are
taken in which the weights are its own (others are GPTQ's, and other models did not fit or are
mixtures). scenarios.yaml and defaults.yaml, seen at near commits, say the rest: fp16 weights,
FlashAttention, checkpointing, Trainer's AdamW of the time (foreach), LoRA of rank 16 beside the
four projections of attention. Only the quantized rows have fp16 autocast. "baseline" rows call
peft's prepare_model_for_kbit_training, "accelerated" ones do not. PyTorch was 2.2 or 2.3.

Assumed: bf16 where all weights train, which takes the same bytes; adapters in fp32; the loss of
`tight_fit`, where transformers of 2024 made a shifted copy of its fp32 logits.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peaks.point import A100, Point
from tight_fit.models.step import ModelStep

SOURCE = (
    "https://github.com/foundation-model-stack/fms-acceleration/blob/04702cc/scripts/benchmarks/"
    "refs/a100_80gb.csv"
)
LORA: dict[str, Any] = {
    "lora_rank": 16,
    "lora_targets": "q_proj,k_proj,v_proj,o_proj",
    "lora_alpha": 16,
    "weights": "fp16",
}
NF4 = LORA | {"base": "nf4", "precision": "fp16"}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"weights": "bf16"},
    "LoRA": LORA,
    "QLoRA after prepare_model_for_kbit_training": NF4 | {"kbit": True},
    "QLoRA": NF4,
}
LENGTH = 4096
ROWS = (  # way, examples, bytes allocated, tokens per second (train_tokens_per_second)
    ("full", 4, 72_971_724_288, 2775.237),
    ("full", 8, 72_972_117_504, 3048.583),
    ("LoRA", 4, 26_108_963_328, 3597.611),
    ("LoRA", 8, 37_098_695_168, 3632.412),
    ("QLoRA after prepare_model_for_kbit_training", 4, 22_825_932_800, 2748.9),
    ("QLoRA after prepare_model_for_kbit_training", 8, 40_278_956_032, 2880.884),
    ("QLoRA", 4, 15_860_019_712, 3428.645),
    ("QLoRA", 8, 26_849_751_552, 3514.427),
)


def step_of(way: str, examples: int) -> ModelStep:
    """The step of a row."""
    return ModelStep.of(
        "mistralai/Mistral-7B-v0.1",
        batch_size=examples,
        length=LENGTH,
        checkpointing=True,
        optimizer="adamw_foreach",
        **WAYS[way],
    )


POINTS = tuple(
    Point(
        f"Mistral-7B, {way}, {examples} × 4096",
        SOURCE,
        "2.2 or 2.3",
        A100,
        step_of(way, examples),
        allocated=allocated,
    )
    for way, examples, allocated, _ in ROWS
)
