"""What a training step needs before it runs: `plan(recipe)`, any Hugging Face model, any step.

`python -m tight_fit` is the command. Names are imported when first asked for, so that the
command can refuse a misspelt option before it has loaded PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helpers.plan.accumulate import fitting
    from helpers.plan.interpolate import plan_at
    from helpers.plan.planner import plan
    from tight_fit.memory.plan import Fit, Plan
    from tight_fit.plans.model import plan_model
    from tight_fit.plans.own_step import plan_custom_step

__all__ = ["Fit", "Plan", "fitting", "plan", "plan_at", "plan_custom_step", "plan_model"]

_HOMES = {
    "Fit": "tight_fit.memory.plan",
    "Plan": "tight_fit.memory.plan",
    "fitting": "helpers.plan.accumulate",
    "plan": "helpers.plan.planner",
    "plan_at": "helpers.plan.interpolate",
    "plan_custom_step": "tight_fit.plans.own_step",
    "plan_model": "tight_fit.plans.model",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
