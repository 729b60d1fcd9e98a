"""The full profile made small enough for a CPU: narrow models, short texts, few examples and steps.

What is built and run is narrow, with the true number of layers; what is planned on its own keeps
its true size, so that sentences about the models you came for stay true. A run's own plan is of
the narrow model, since it is compared with the narrow model's measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from helpers.recipe import Recipe, replace

TOKENS, TRAIN, TEST, STEPS = 16, 128, 24, 6  # at most
VOCABULARY = 4096
CHAT_TOKENS = 96  # at most, of a question with its text and its answer
DECODER = {
    "vocab_size": 2 * VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WIDTHS: dict[str, dict[str, int]] = {
    "deberta": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "pooler_hidden_size": 48,
        "vocab_size": VOCABULARY,
        "position_buckets": 16,
    },
    "deberta-large": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "pooler_hidden_size": 64,
        "vocab_size": VOCABULARY,
        "position_buckets": 16,
    },
    "decoder": {"hidden_size": 64, "intermediate_size": 128} | DECODER,
    "decoder-1.7b": {"hidden_size": 96, "intermediate_size": 192} | DECODER,
    "vit": {"hidden_size": 96, "intermediate_size": 192, "image_size": 32},
}
# Processes that measure one step beside its plan have nothing to plan at its true size.
MEASURE = ("benchmarks.measured_steps", "gpu_layout_ranks.py")
_measures = any(word.endswith(MEASURE) for word in sys.orig_argv)
_narrow: ContextVar[bool] = ContextVar("narrow", default=_measures)


def narrowed(config: Any, model: str) -> Any:
    """A configuration of a full model with the widths of `WIDTHS`, changed in place."""
    for name, value in WIDTHS[model].items():
        setattr(config, name, value)
    return config


def inside(function: Callable) -> Callable:
    """The function, which now builds and plans full models as narrow ones."""
    return _with(function, narrow=True)


def outside(function: Callable) -> Callable:
    """The function, which plans full models at their true size, wherever it is called."""
    return _with(function, narrow=False)


def _with(function: Callable, narrow: bool) -> Callable:
    @wraps(function)
    def run(*args, **kwargs):
        token = _narrow.set(narrow)
        try:
            return function(*args, **kwargs)
        finally:
            _narrow.reset(token)

    return run


def fewer(recipe: Recipe) -> Recipe:
    """The recipe with as few examples as a rehearsal has; one of the mini profile as it is."""
    if recipe.profile != "full":
        return recipe
    train = min(recipe.train_size or TRAIN, max(TRAIN, recipe.batch_size))
    return replace(recipe, train_size=train, test_size=min(recipe.test_size or TEST, TEST))


def change_recipe(module) -> None:
    """helpers.recipe: texts are short wherever something is narrow."""
    true = module.Recipe.tokens.fget

    def tokens(self):
        found = true(self)
        short = _narrow.get() and self.profile == "full" and found is not None
        return min(found, CHAT_TOKENS if self.task == "chat" else TOKENS) if short else found

    module.Recipe.tokens = property(tokens, doc=true.__doc__)


def change_models(module) -> None:
    """helpers.models: what is built is narrow; what is empty, for a plan, only inside a run."""
    true = module.config

    def config(recipe):
        found = true(recipe)
        return (
            narrowed(found, recipe.model) if _narrow.get() and recipe.profile == "full" else found
        )

    module.config = config
    module.build, module.processor = inside(module.build), inside(module.processor)


def change_plan(module) -> None:
    """helpers.plan: a narrow plan is not taken for a true one that was kept."""
    true = module._plan.__wrapped__

    @lru_cache(maxsize=256)
    def kept(recipe, device, narrow):
        return true(recipe, device)

    module._plan = lambda recipe, device: kept(recipe, device, _narrow.get())
    module.explain = outside(module.explain)


def change_profile(module) -> None:
    """helpers.profile: recipes of this machine have few examples and steps from the start."""
    true = module.recipe

    @wraps(true)
    def recipe(model="deberta", **fields):
        made = fewer(true(model, **fields))
        return replace(made, steps=min(made.steps, STEPS)) if made.profile == "full" else made

    module.recipe = recipe


def change_train(module) -> None:
    """helpers.train: data are few and short, models narrow."""
    encoded = inside(module.encoded)
    module.encoded = wraps(encoded)(lambda recipe: encoded(fewer(recipe)))
    module.fit, module.evaluate = inside(module.fit), inside(module.evaluate)


def change_record(module) -> None:
    """helpers.record: a run is one of narrow models."""
    module.run = inside(module.run)


def change_measure(module) -> None:
    """helpers.measure: so is what is measured."""
    module.measure = inside(module.measure)
