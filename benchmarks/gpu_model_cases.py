"""The steps of `benchmarks.gpu_models`, each by name: a model and the fields of its step."""

from __future__ import annotations

from typing import Any

from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep

QWEN = (
    "Qwen/Qwen3-0.6B",
    {"batch_size": 8, "length": 1024, "precision": "bf16", "weights": "fp32"},
)
# An eighth of Llama's layers, so that a step with all weights fits one GPU; in bf16.
FOUR_LAYERS = (
    "meta-llama/Llama-3.1-8B",
    {"num_hidden_layers": 4, "batch_size": 1, "length": 8192, "weights": "bf16"},
)
LONG = {"batch_size": 1, "length": 32_768, "checkpointing": True, "loss": "chunked"}
EIGHT_B = (
    "meta-llama/Llama-3.1-8B",
    {"batch_size": 2, "length": 2048, "weights": "bf16"},
)
ADAPTERS = {"lora_rank": 16, "lora_targets": "all-linear"}
FP8 = {"compile": True, "float8": "tensorwise"}
ROWS = {"compile": True, "float8": "rowwise"}

_GROUPS: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, dict[str, Any]]]] = {
    "Qwen3-0.6B": (
        QWEN,
        {
            "plain": {},
            "compile": {"compile": True},
            "compile, FP8 tensorwise": FP8,
            "compile, FP8 rowwise": ROWS,
            "checkpointing": {"checkpointing": True},
            "checkpointing, compile": {"checkpointing": True, "compile": True},
            "chunked loss": {"loss": "chunked"},
            "LoRA": {"weights": "bf16", **ADAPTERS},
            "QLoRA": {"weights": None, "base": "nf4", **ADAPTERS},
            "eager attention": {"attention": "eager"},
            "fp32": {"precision": "fp32"},
            "fp16": {"precision": "fp16"},
            "accumulation": {"accumulation": 4},
            "bf16 weights, stochastic": {
                "weights": "bf16", "precision": "fp32", "optimizer": "adamw_stochastic",
            },
            "optimizer in backward": {"optimizer_in_backward": True, "max_grad_norm": None},
            "8-bit AdamW": {"optimizer": "adamw8bit"},
            "paged 8-bit AdamW": {"optimizer": "paged_adamw8bit"},
            "Adafactor": {"optimizer": "adafactor"},
            "Muon": {"optimizer": "muon"},
            "offload optimizer": {"offload": "optimizer"},
            "offload activations": {"offload": "activations"},
            "dpo, LoRA": {"task": "dpo", "weights": "bf16", "batch_size": 4, **ADAPTERS},
            "grpo, LoRA": {"task": "grpo", "weights": "bf16", **ADAPTERS},
        },
    ),
    "4 layers of Llama-3.1-8B": (
        FOUR_LAYERS,
        {
            "plain": {},
            "compile": {"compile": True},
            "compile, FP8 tensorwise": FP8,
            "compile, FP8 rowwise": ROWS,
            "long, checkpointing": LONG,
            "long, checkpointing, compile": {**LONG, "compile": True},
            "long, checkpointing, compile, FP8 rowwise": {**LONG, **ROWS},
        },
    ),
    "Llama-3.1-8B": (
        EIGHT_B,
        {
            "LoRA": ADAPTERS,
            "LoRA, checkpointing": {"checkpointing": True, **ADAPTERS},
            "QLoRA": {"weights": None, "base": "nf4", **ADAPTERS},
            "QLoRA, prepared": {
                "weights": None, "base": "nf4", "kbit": True, "precision": "bf16",
                "optimizer": "paged_adamw8bit", **ADAPTERS,
            },
            "all weights, 8-bit AdamW": {"checkpointing": True, "optimizer": "adamw8bit"},
        },
    ),
    "others": (
        ("", {"precision": "bf16"}),
        {
            "BERT-base": {"model": "google-bert/bert-base-uncased", "batch_size": 32,
                          "length": 128},
            "RoBERTa-large, fp32": {"model": "FacebookAI/roberta-large", "batch_size": 16,
                                    "length": 512, "precision": "fp32"},
            "RoBERTa-large": {"model": "FacebookAI/roberta-large", "batch_size": 32,
                              "length": 512},
            "ModernBERT-large": {"model": "answerdotai/ModernBERT-large", "batch_size": 16,
                                 "length": 1024},
            "GPT-2 medium": {"model": "openai-community/gpt2-medium", "batch_size": 8,
                             "length": 1024},
            "T5-base": {"model": "google-t5/t5-base", "batch_size": 16, "length": 512},
            "BART-large": {"model": "facebook/bart-large", "batch_size": 16, "length": 512},
            "DINOv2-base": {"model": "facebook/dinov2-base", "batch_size": 64},
            "ResNet-50": {"model": "microsoft/resnet-50", "batch_size": 256},
            "SegFormer-B0": {"model": "nvidia/segformer-b0-finetuned-ade-512-512",
                             "batch_size": 16},
            "CLIP ViT-B/32": {"model": "openai/clip-vit-base-patch32", "batch_size": 256},
            "Whisper-small": {"model": "openai/whisper-small", "batch_size": 16, "length": 128},
            "Qwen2.5-VL-3B, LoRA": {"model": "Qwen/Qwen2.5-VL-3B-Instruct", "batch_size": 2,
                                    "length": 1024, "weights": "bf16", "task": "image-text-to-text",
                                    **ADAPTERS},
            "Qwen2.5-7B, LoRA": {"model": "Qwen/Qwen2.5-7B", "batch_size": 1, "length": 4096,
                                 "weights": "bf16", "checkpointing": True, **ADAPTERS},
            "Mistral-7B, QLoRA": {"model": "mistralai/Mistral-7B-v0.1", "batch_size": 2,
                                  "length": 2048, "base": "nf4", "checkpointing": True,
                                  **ADAPTERS},
        },
    ),
}  # fmt: skip


def _cases() -> dict[str, dict[str, Any]]:
    found = {}
    for group, ((model, shared), changes) in _GROUPS.items():
        for name, change in changes.items():
            named = name if group == "others" else f"{group}, {name}"
            found[named] = {"model": model, **shared, **change}
    return found


CASES = _cases()


def step_of(name: str) -> ModelStep:
    """The step of a case."""
    fields = dict(CASES[name])
    config = hf_config.read(fields.pop("model"))
    count = fields.pop("num_hidden_layers", None)
    if count is not None:
        config.num_hidden_layers = count
    return ModelStep.of(config, **fields)
