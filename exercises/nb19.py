"""Exercises of notebook 19: everything together."""

from __future__ import annotations

import itertools
import random
from functools import cache

from exercises.check import exercise
from exercises.comparisons import same
from exercises.handout import observe
from helpers.ladder import START
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.units import size

SHORT = Recipe("deberta", profile="full", batch_size=2, length=32)
LONG = Recipe("deberta", profile="full", batch_size=16, length=256, precision="bf16", lora_rank=8)
COMMON = {"checkpointing": True, "optimizer": "adamw8bit", "frozen": 6}
CHOICES = {
    "short": (SHORT, {"accumulation": 2, **COMMON, "lora_rank": 8}),
    "long": (LONG, {"accumulation": 4, **COMMON}),
}
BEST = {"short": "lora_rank", "long": "checkpointing"}  # frees most; a test plans all changes
GPU = "GTX 1650"

_base = Recipe("deberta", profile="full", length=256, batch_size=16, steps=200)
_rows = (
    ("fp32", {}),
    ("accumulation", {"batch_size": 64, "accumulation": 4}),
    ("bf16", {"precision": "bf16", "learning_rate": 3e-5}),
    ("padding", {"padding": "dynamic", "seed": 1}),
    ("checkpointing", {"checkpointing": True, "length": 128}),
    ("8-bit", {"optimizer": "adamw8bit", "steps": 400}),
    ("freezing", {"frozen": 6, "batch_size": 16}),
    ("LoRA", {"lora_rank": 8, "learning_rate": 2e-4}),
)


def _climb(recipe: Recipe) -> list[tuple[str, Recipe]]:
    rungs = []
    for name, change in _rows:
        recipe = replace(recipe, **change)
        rungs.append((name, recipe))
    return rungs


BLOG = _climb(_base)  # (what the author calls the row of the table, its recipe)


@cache
def freed(situation: str, field: str) -> int:
    """Bytes that one more field frees at the planned peak."""
    recipe, changes = CHOICES[situation]
    return plan(recipe).peak - plan(replace(recipe, **{field: changes[field]})).peak


@exercise(
    "19.1",
    hints=[
        (
            "Ask what the peak is made of: "
            "two examples of 32 tokens leave hardly any activations, "
            "adapters leave hardly any states."
        ),
        (
            "Short: gradients and states are three quarters of it, "
            "and one field does away with both. Long: what remains is activations; "
            "which field keeps only the layers' inputs?"
        ),
    ],
    why=(
        "The right rung is the one that shrinks what the peak is made of now, "
        "not the one that is famous."
    ),
)
def _(answer):
    assert isinstance(answer, (tuple, list)) and len(answer) == 2, (
        "your answer should be two names of fields: for the short, for the long one"
    )
    for (situation, (_, changes)), field in zip(CHOICES.items(), answer):
        assert field in changes, (
            f"{field!r} is not among the fields to choose from for the {situation} one: "
            f"{', '.join(changes)}"
        )
        assert field == BEST[situation], (
            f"for the {situation} one, {field} frees {size(freed(situation, field))}, "
            "and another field frees more"
        )


@exercise(
    "19.2",
    hints=[
        (
            "The frozen half is a must here: it leaves half of the gradients and states. "
            "Then 16 bits, checkpointing, 8-bit states."
        ),
        (
            "What is still too much is a layer's inside for four examples, and the checkpoints: "
            "how many examples at a time must it be?"
        ),
    ],
    why="Four gigabytes train half of a large model, if one example at a time is enough.",
)
def _(answer):
    assert isinstance(answer, Recipe), "your answer should be a Recipe: replace(ladder.START, ...)"
    for field in ("model", "profile", "length", "batch_size"):
        mine, asked = getattr(answer, field), getattr(START, field)
        assert mine == asked, f"{field} should stay {asked!r}, yours is {mine!r}"
    assert answer.lora_rank is None, "it should do without LoRA"
    assert (answer.frozen or 0) <= START.layers // 2, (
        f"at least the upper {START.layers // 2} layers should be trained"
    )
    assert answer.precision != "bf16", f"the {GPU} has no bf16: use fp16"
    fit = plan(answer).fits(GPU)
    assert fit, f"it {fit}"


@exercise(
    "19.3",
    hints=[
        (
            "Leave out of each row the technique that it is named after. "
            "What else changed, and does a peak depend on it?"
        ),
        (
            "Learning rates, seeds and the number of steps leave a peak as it is, "
            "and a larger batch too when it comes in as many more micro-batches. "
            "Examples per micro-batch and tokens per example do not."
        ),
    ],
    why=(
        "Two rows are wrong about memory, and others about accuracy: "
        "which comparison is spoilt depends on what is compared."
    ),
)
def _(answer):
    names = [name for name, _ in BLOG[1:]]
    assert isinstance(answer, (set, frozenset, list, tuple)), "your answer should be a set of names"
    unknown = sorted(set(map(str, answer)) - set(names))
    assert not unknown, f"{unknown[0]!r} is no row of the blog's ladder"
    truth = confounded()
    extra, missing = sorted(set(answer) - truth), sorted(truth - set(answer))
    assert not extra, (
        f"{extra[0]!r} changed other things too, but none that its peak depends on, or none at all"
    )
    assert not missing, f"{len(missing)} more of them changed something that the peak depends on"


def confounded() -> set[str]:
    """The rows of BLOG in which more than the technique named changed what a peak depends on.

    That is the number of examples per micro-batch, or of tokens per example.
    """
    return {
        name
        for (_, before), (name, after) in zip(BLOG, BLOG[1:])
        if (before.tokens, before.micro_batch) != (after.tokens, after.micro_batch)
    }


@exercise(
    "19.4",
    hints=[
        (
            "itertools.permutations gives the orders. Walk up each one: "
            "the saving of a rung is the peak before it less the peak after it."
        ),
        (
            "Keep the set of techniques that are on, starting from frozenset(); "
            "add up the savings by name, and divide by the number of orders."
        ),
    ],
    why=(
        "It is Shapley's value. It is fair to every order, and still no prediction: "
        "your ladder has one order only."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of peak and names"
    generator = random.Random(0)
    for count in (1, 2, 3, 4, 2):
        names = tuple("abcd"[:count])
        values = {
            frozenset(part): generator.randint(1, 10**6)
            for size in range(count + 1)
            for part in itertools.combinations(names, size)
        }
        given = observe(_credited, answer, values, names)
        assert isinstance(given, dict), (
            "your function should give a dict: name of the technique to bytes"
        )
        assert set(given) == set(names), (
            "your function should give every technique its credit, and nothing else"
        )
        same(
            given,
            _credit(values, names),
            rel=1e-9,
            atol=1e-6,
            what=f"the credits of {count} techniques",
        )


def _credited(answer, values: dict[frozenset, int], names: tuple[str, ...]):
    return answer(lambda on: values[frozenset(on)], names)


def _credit(values: dict[frozenset, int], names: tuple[str, ...]) -> dict[str, float]:
    orders = list(itertools.permutations(names))
    credit = dict.fromkeys(names, 0.0)
    for order in orders:
        for index, name in enumerate(order):
            credit[name] += (
                values[frozenset(order[:index])] - values[frozenset(order[: index + 1])]
            ) / len(orders)
    return credit
