"""What a training step needs before it runs: `plan(recipe)`, any Hugging Face model, any step."""

from helpers.plan.interpolate import plan_at
from helpers.plan.planner import fitting, plan
from tight_fit.memory.plan import Fit, Plan
from tight_fit.plans.model import plan_model
from tight_fit.plans.own_step import plan_custom_step

__all__ = ["Fit", "Plan", "fitting", "plan", "plan_at", "plan_custom_step", "plan_model"]
