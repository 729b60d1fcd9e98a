"""What other memory estimators say of the same steps, beside the plan and the truth.

The truth, real tensors on the CPU, is known of the small steps.

    accelerate estimate-memory   four times the weights; it knows no batch, length, technique
                                 or activation
    torch-preflight              a formula of layers, hidden size, heads and length, calibrated on
                                 some GPUs; optional (pip install torch-preflight: pure Python, it
                                 neither brings nor replaces torch)

Both are called by code, without their network look-ups. `python -m benchmarks.other_estimators`
prints the table.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import AutoModel, PretrainedConfig

from helpers import models
from helpers.recipe import Recipe
from helpers.tables import Table
from tight_fit.command.wrapper import run as run_command
from tight_fit.models import config as hf_config
from tight_fit.plans.model import ModelStep, measured, plan_model_step
from tight_fit.techniques import model_changes
from tight_fit.units import size

_SMALL: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}


def cases() -> dict[str, tuple[ModelStep, bool]]:
    """{name: (step, small enough to run here)}"""

    def mini(model: str) -> PretrainedConfig:
        return models.config(Recipe(model=model))

    small = {
        "mini DeBERTa": ModelStep(mini("deberta"), batch_size=16, length=64),
        "mini DeBERTa, bf16, checkpointing": ModelStep(
            mini("deberta"), batch_size=16, length=64, precision="bf16", checkpointing=True
        ),
        "mini ViT": ModelStep(mini("vit"), batch_size=16),
        "small BERT": ModelStep(transformers.BertConfig(**_SMALL), batch_size=8, length=128),
        "small Llama": ModelStep(
            transformers.LlamaConfig(**_SMALL, num_key_value_heads=2), batch_size=8, length=128
        ),
        "small Llama, accumulation 4": ModelStep(
            transformers.LlamaConfig(**_SMALL, num_key_value_heads=2),
            batch_size=8,
            length=128,
            accumulation=4,
        ),
        "small Swin": ModelStep(
            transformers.SwinConfig(
                image_size=64, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
            ),
            batch_size=8,
        ),
    }
    base, large, vit = (hf_config.read(name) for name in models.REPOS.values())
    full = {
        "DeBERTa-v3-base, 16 × 256": ModelStep(base, batch_size=16, length=256),
        "DeBERTa-v3-large, 16 × 512": ModelStep(large, batch_size=16, length=512),
        "DeBERTa-v3-large, checkpointing, 4 × 4 × 512": ModelStep(
            large, batch_size=16, length=512, checkpointing=True, accumulation=4
        ),
        "ViT-B/16, 32 images": ModelStep(vit, batch_size=32),
    }
    return {name: (step, True) for name, step in small.items()} | {
        name: (step, False) for name, step in full.items()
    }


def estimate_memory(step: ModelStep) -> int | None:
    """Bytes that `accelerate estimate-memory` prints under "Training using Adam".

    As its `create_empty_model` does, this makes the model without a head, on the meta device. None
    where accelerate is not installed.
    """
    if find_spec("accelerate") is None:
        return None
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with init_empty_weights(), model_changes.quiet():
        model = AutoModel.from_config(hf_config.read(step.config), dtype=torch.float32)
    total, _ = calculate_maximum_sizes(model)
    precision = "float32" if step.precision == "fp32" else "float16"
    return int(max(estimate_training_usage(total, precision).values()))


def fused(step: ModelStep, device: str) -> bool:
    """Whether the attention is fused, so that it keeps no probabilities: torch-preflight asks.

    On a CPU there is no such kernel with dropout.
    """
    config = step.config
    dropout = getattr(
        config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", 0)
    )
    fusible = bool(hf_config.class_of(config, step.task)._supports_sdpa)
    return fusible and (device == "cuda" or not dropout)


# What torch-preflight calls our optimizers.
_OPTIMIZERS = {
    "adamw": "adamw",
    "adamw8bit": "adamw-8bit",
    "adamw8bit_embed32": "adamw-8bit",
    "sgd": "sgd-momentum",
    "adafactor": "adafactor",
    "lion": "lion",
    "lion8bit": "lion-8bit",
}


def preflight(step: ModelStep, device: str, frozen: float = 0.0) -> int | None:
    """Bytes of tensors that torch-preflight expects on the GPU.

    CUDA context and fragmentation are left out, so that tensors are compared with tensors. None
    where it is not installed, or cannot read the configuration.

    frozen  the fraction of the parameters that does not train, which it does not work out itself
    """
    if find_spec("torch_preflight") is None:
        return None
    from torch_preflight.vram import (
        ModelProfile,
        OptimizerKind,
        PrecisionMode,
        RunConfig,
        estimate_config,
    )
    from torch_preflight.vram.costmodel import params_from_transformer_shape
    from torch_preflight.vram.providers.hub import shape_from_config
    from torch_preflight.vram.types import Confidence, ModelKind

    config = step.config.to_dict() | {
        "architectures": [hf_config.class_of(step.config, step.task).__name__]
    }
    shape = shape_from_config(config)
    if shape is None:
        return None
    count = params_from_transformer_shape(shape)  # its own count, as for a model of the hub
    profile = ModelProfile(
        name=step.config.model_type,
        param_count=count,
        trainable_params=count,
        source="hub",
        confidence=Confidence.MEDIUM,
        kind=ModelKind.TRANSFORMER,
        shape=shape,
    )
    length = step.tokens
    if length is None:
        patch = getattr(step.config, "patch_size", 16)
        length = (hf_config.image_shape(step.config, step.side)[1] // patch) ** 2 + 1
    run = RunConfig(
        batch_size=step.micro_batch,
        seq_len=length,
        optimizer=OptimizerKind(_OPTIMIZERS[step.optimizer]),
        frozen_fraction=frozen,
        precision=PrecisionMode.FP32 if step.precision == "fp32" else PrecisionMode.AMP,
        gradient_checkpointing=step.checkpointing,
        accumulation_steps=step.accumulation,
        flash_attention=fused(step, device),
    )
    breakdown = estimate_config(profile, run).breakdown
    return sum(
        getattr(breakdown, name)
        for name in (
            "weights",
            "gradients",
            "optimizer_state",
            "master_weights",
            "autocast_cache",
            "activations",
        )
    )


def table() -> Table:
    """A row per step, against real tensors on the CPU where the step is small, else the plan."""
    rows = []
    for name, (step, small) in cases().items():
        device = "cpu" if small else "cuda"
        planned = plan_model_step(step, device).peak
        truth = measured(step).peak if small else planned
        row = {
            "step": name,
            "real tensors": size(truth) if small else "n/a",
            "plan": f"{size(planned)}{_off(planned, truth, small)}",
        }
        for estimator, estimate in (
            ("accelerate estimate-memory", estimate_memory(step)),
            ("torch-preflight", preflight(step, device)),
        ):
            off = "" if estimate is None else f" ({estimate / truth - 1:+.0%})"
            row[estimator] = f"{size(estimate)}{off}"
        rows.append(row)
    missing = "" if find_spec("torch_preflight") else "; torch-preflight is not installed"
    return Table(
        rows,
        "Peak of the tensors of one training step, and how far off; rows without real tensors are "
        f"compared with the plan for a GPU{missing}",
    )


def _off(planned: int, truth: int, small: bool) -> str:
    return f" ({planned - truth:+,} bytes)" if small else ""


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.other_estimators",
        description="What other estimators say of the same steps.",
    ).parse_args()
    print(table())


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m benchmarks.other_estimators"))
