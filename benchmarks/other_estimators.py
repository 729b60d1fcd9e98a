"""What other memory estimators say of a step, to stand beside the plan and the truth.

    accelerate estimate-memory   four times the weights; it knows no batch, length, technique
                                 or activation
    torch-preflight              a formula of layers, hidden size, heads and length, calibrated on
                                 some GPUs; optional (pip install torch-preflight: pure Python, it
                                 neither brings nor replaces torch)

Both are called by code, without their network look-ups.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import AutoModel

from tight_fit.models import config as hf_config
from tight_fit.plans.model import ModelStep
from tight_fit.techniques import model_changes


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
