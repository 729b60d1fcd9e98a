"""What each sweep compares: its recipe, its arms and where their learning rates start.

data/sweeps.json has the plans; `base` and `fields` are fields of a recipe. The models are the mini
ones on one CPU core, with data that come with the course's requirements. Rates are tried in factors
of two from `start` on, in both directions, until the best is inside.

- Handwritten digits: 400 training images, 8 epochs; the other training images choose the rate.
  Arms with larger batches take as many steps as 8 epochs have.
- Reuters documents: their first 32 tokens, in batches made by their lengths at 256 tokens. In the
  time of 100 bucketed steps of 256 tokens, a random order makes 35: by the processor seconds of a
  step of 16 documents at each padded length, and the padded lengths of an epoch in either order.
  An arm of 05_embeddings names the order that every arm has, so that runs of 10_batches are taken.
- Questions about Reuters documents, cut to 64 tokens: 60 steps, a sixth of an epoch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pages import DATA
from benchmarks.sweeps.results import Arm
from helpers.recipe import Recipe

SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class SweepPlan:
    """A sweep before it is run.

    name        of its file, begins with the number of its notebook
    question    what it asks, in a sentence
    base        the recipe that all arms share
    arms        what is compared; the first is what the others are compared with
    validation  examples of the training split that choose the learning rate
    seeds       at the best learning rate and its neighbours; the first two at all others
    twice       also run every arm with twice its steps, at its best learning rate
    references  names of methods without a learning rate (`trial.REFERENCES`)
    note        what a reader must know beside the recipe, in whole sentences
    """

    name: str
    question: str
    base: Recipe
    arms: tuple[Arm, ...]
    validation: int
    seeds: tuple[int, ...] = SEEDS
    twice: bool = True
    references: tuple[str, ...] = field(default=())
    note: str = ""


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]  # of every layer of ViT


def _plan(kept: dict[str, Any]) -> SweepPlan:
    made = {
        "base": Recipe(**kept["base"]),
        "arms": tuple(Arm(**{"fields": {}, **arm}) for arm in kept["arms"]),
        "references": tuple(kept.get("references", ())),
    }
    return SweepPlan(**kept | made)


PLANS = tuple(map(_plan, json.loads((DATA / "sweeps.json").read_text(encoding="utf8"))))
SWEEPS = {plan.name: plan for plan in PLANS}
