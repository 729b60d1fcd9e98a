"""Plans read from the calculator's file, as its page reads them."""

from __future__ import annotations

from functools import cache
from typing import Any

from tight_fit.memory.plan import Plan, to_plan
from tight_fit.models import config as hf_config
from tight_fit.models import names as model_names
from tight_fit.models.step import ModelStep
from tools.calculator.make import kept_models
from tools.calculator.sizes import UNIT, Shape, Size
from tools.calculator.stream import read


@cache
def known() -> dict[str, dict[str, Any]]:
    """{model: what is kept of it}, streams as words."""
    return kept_models()


def step(model: str, fields: dict[str, Any]) -> ModelStep:
    """The step that the fields of `ModelStep` describe, as the command takes them."""
    config = hf_config.from_values(model_names.known()[model], model)
    taken = ModelStep(config, **fields)
    if "precision" in fields:
        return taken
    assert taken.weights is not None, "set when the step was made"
    return ModelStep(config, **fields, precision=taken.weights)


def plan(model: str, fields: dict[str, Any]) -> Plan:
    """The plan of a step. Raises KeyError for one that the file does not hold."""
    asked, facts = step(model, fields), known()[model]
    trained = "lora" if asked.lora_rank else "half" if asked.frozen is not None else "all"
    numbers = "bf16" if asked.weights == "bf16" else "mixed"
    if asked.weights == "fp32" and asked.precision in ("fp32", "tf32"):
        numbers = "fp32"
    sections = dict(facts["streams"][f"{numbers}/{int(asked.checkpointing)}/{trained}"])
    if asked.optimizer != "adamw":
        sections |= facts["streams"][f"{asked.weights}/{trained}/{asked.optimizer}"]
    if asked.accumulation == 1:
        sections["second"] = []
    words = [word for section in sections.values() for word in section]
    units = (asked.tokens or UNIT) // UNIT if facts["longest"] else 1
    shape = Shape(asked.micro_batch, units, asked.lora_rank or 1)
    trace = read(words, [Size(*size) for size in facts["sizes"]], shape)
    return to_plan((trace, facts["parameters"]), asked, "cuda")
