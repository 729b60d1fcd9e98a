"""The steps of `benchmarks.gpu_models`, each by name: a model and the fields of its step.

They are data/gpu_models.json. "4 layers of Llama-3.1-8B" are an eighth of the model's layers, so
that a step with all weights fits one GPU.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.pages import DATA
from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep

CASES: dict[str, dict[str, Any]] = json.loads((DATA / "gpu_models.json").read_text(encoding="utf8"))


def step_of(name: str) -> ModelStep:
    """The step of a case."""
    fields = dict(CASES[name])
    config = hf_config.read(fields.pop("model"))
    count = fields.pop("num_hidden_layers", None)
    if count is not None:
        config.num_hidden_layers = count
    return ModelStep.of(config, **fields)
