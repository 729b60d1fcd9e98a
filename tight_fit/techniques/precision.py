"""The arithmetic of a step: autocast, and tensor cores for fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tight_fit.techniques.settings import StepSettings

# Of weights, by the names of `models.config.WEIGHTS`.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(recipe: StepSettings, device: torch.device) -> AbstractContextManager:
    """The precision of a forward pass, as a context."""
    if recipe.precision in AUTOCAST:
        return torch.autocast(device.type, AUTOCAST[recipe.precision])
    return nullcontext()


@contextmanager
def tensor_cores(recipe: StepSettings) -> Iterator[None]:
    """TF32 for matrix products and convolutions exactly when the recipe says so; restored after.

    PyTorch's default is off for matrix products and on for convolutions: with it, "fp32" would be
    neither.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if recipe.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = recipe.precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
