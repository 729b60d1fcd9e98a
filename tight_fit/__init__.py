"""What a training step needs, before it runs: bytes, FLOPs and seconds, of any model or program.

from tight_fit import plan_model

print(plan_model("roberta-large", gpu="T4", batch_size=16, precision="fp16").fits("T4"))

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
    from tight_fit.gpus.table import GPU
    from tight_fit.layouts.cluster import Cluster
    from tight_fit.layouts.layout import Layout
    from tight_fit.layouts.plan import plan_layout
    from tight_fit.memory.plan import Fit, Plan
    from tight_fit.models.step import ModelStep
    from tight_fit.plans.model import plan_model
    from tight_fit.plans.own_step import plan_custom_step
    from tight_fit.script.plan import plan_program
    from tight_fit.search.fastest import fastest
    from tight_fit.search.layouts import search_layouts
    from tight_fit.search.remedies import Remedies

__version__ = "0.2.0.dev0"  # the only place of the version; CHANGELOG.md says what is in it
__all__ = [
    "GPU",
    "Cluster",
    "Fit",
    "Layout",
    "LightningPlanCallback",
    "ModelStep",
    "Plan",
    "PlanCallback",
    "Remedies",
    "fastest",
    "plan_custom_step",
    "plan_layout",
    "plan_model",
    "plan_program",
    "search_layouts",
]

_HOMES = {
    "GPU": "tight_fit.gpus.table",
    "Cluster": "tight_fit.layouts.cluster",
    "Fit": "tight_fit.memory.plan",
    "Layout": "tight_fit.layouts.layout",
    "LightningPlanCallback": "tight_fit.callback.lightning",
    "ModelStep": "tight_fit.models.step",
    "Plan": "tight_fit.memory.plan",
    "PlanCallback": "tight_fit.callback.trainer",
    "Remedies": "tight_fit.search.remedies",
    "fastest": "tight_fit.search.fastest",
    "plan_custom_step": "tight_fit.plans.own_step",
    "plan_layout": "tight_fit.layouts.plan",
    "plan_model": "tight_fit.plans.model",
    "plan_program": "tight_fit.script.plan",
    "search_layouts": "tight_fit.search.layouts",
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
