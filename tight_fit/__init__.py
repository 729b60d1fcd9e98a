"""What a training step needs, before it runs: bytes, FLOPs and seconds, of any model or program.

from tight_fit import plan_model

plan_model("roberta-large", batch_size=16, precision="bf16").fits("T4")

Names are imported when first asked for, so that the command can refuse a misspelt option before it
has loaded PyTorch. `python -m tight_fit` is the command.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tight_fit.callback.lightning import LightningPlanCallback
    from tight_fit.callback.trainer import PlanCallback
    from tight_fit.memory.plan import Fit, Plan
    from tight_fit.plans.model import plan_model
    from tight_fit.plans.own_step import plan_custom_step

__all__ = [
    "Fit",
    "LightningPlanCallback",
    "Plan",
    "PlanCallback",
    "plan_custom_step",
    "plan_model",
]
__version__ = "0.2.0.dev0"  # the only place of the version; CHANGELOG.md says what is in it

_HOMES = {
    "Fit": "tight_fit.memory.plan",
    "LightningPlanCallback": "tight_fit.callback.lightning",
    "Plan": "tight_fit.memory.plan",
    "PlanCallback": "tight_fit.callback.trainer",
    "plan_custom_step": "tight_fit.plans.own_step",
    "plan_model": "tight_fit.plans.model",
}

# When bitsandbytes is imported, it warns that some CPUs lack a kernel for 4-bit products. Nothing
# here needs that kernel.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def load_ipython_extension(shell) -> None:
    """`%load_ext tight_fit`: the magic `%%plan`, which plans a cell's training."""
    shell.register_magics(import_module(f"{__name__}.command.magic").PlanMagics)
