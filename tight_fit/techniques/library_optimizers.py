"""The optimizers of bitsandbytes, with states in 8 bits, paged or not.

Paged states (Dettmers et al. 2023, QLoRA) are in CUDA's unified memory: the driver brings them to
the GPU when they are used, and moves them to the host when the GPU needs the room. PyTorch's
allocator knows nothing of them, so a plan counts them with the host's memory. Where there is no
CUDA nothing is paged, and the states are those of adamw8bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tight_fit.packages import needs
from tight_fit.techniques.compiled import compiling_when_called
from tight_fit.techniques.settings import StepSettings

PAGED_FROM = 100_000  # elements; the states of smaller tensors are not paged (bitsandbytes)


def make(
    model: nn.Module, trained: list[nn.Parameter], recipe: StepSettings
) -> torch.optim.Optimizer:
    """The optimizer of bitsandbytes that a recipe names, over `trained`, parameters of `model`.

    Raises ModuleNotFoundError, in one sentence, where bitsandbytes is missing.
    """
    needs("bitsandbytes")
    with compiling_when_called():
        from bitsandbytes import optim as library

    kinds = {"lion": library.Lion, "lion8bit": library.Lion8bit}
    if recipe.optimizer == "paged_adamw8bit" and trained[0].is_cuda:
        kinds[recipe.optimizer] = library.PagedAdamW8bit
    kind = kinds.get(recipe.optimizer, library.AdamW8bit)
    optimizer = kind(trained, lr=recipe.peak_learning_rate, weight_decay=recipe.weight_decay)
    # The library keeps overrides in one table for the whole process, by position in the optimizer:
    # those of one optimizer would reach the next. This one gets a table of its own.
    optimizer.mng = object.__new__(library.GlobalOptimManager)
    optimizer.mng.initialize()
    if recipe.optimizer == "adamw8bit_embed32":
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer


def paged_states(optimizer: torch.optim.Optimizer, planned: bool) -> list[torch.Tensor]:
    """The states that are paged, or with `planned` those that would be on a GPU."""
    found: list[torch.Tensor] = []
    for parameter, state in optimizer.state.items():
        whole: Any = [state[name] for name in ("state1", "state2") if name in state]
        for value in whole:
            if getattr(value, "is_paged", planned and parameter.numel() >= PAGED_FROM):
                found.append(value)
    return found
