"""What each sweep compares, as data: its recipe, its arms and where their learning rates start.

The models are the mini ones on one CPU core, with data that come with the course's requirements.
Rates are tried in factors of two from `start` on, in both directions, until the best is inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.sweeps.results import Arm
from helpers.recipe import Recipe, replace

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


# 400 training images of handwritten digits, 8 epochs; the other training images choose the rate.
DIGITS = Recipe("vit", profile="mini", train_size=400, batch_size=16, steps=200)

# The first 32 tokens of Reuters documents, in batches made by their lengths at 256 tokens. In the
# time of 100 bucketed steps of 256 tokens, a random order makes 35: python -m
# benchmarks.sweeps.orders.
R8 = Recipe(
    "deberta", profile="mini", data="r8", length=32, padding="dynamic", batch_size=16, steps=100
)
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]  # of every layer of ViT
FULL = Arm("all weights train", {}, 1e-3)


def _lora(name: str, targets: list[str], rank: int, start: float) -> Arm:
    return Arm(name, {}, start, {"lora": {"targets": targets, "rank": rank}})


def _batch(name: str, size: int, start: float, kind: str = "", against: str | None = None) -> Arm:
    """An arm with batches of `size`, for as many epochs as the base recipe."""
    epochs = DIGITS.steps * DIGITS.batch_size / 400
    steps = round(epochs * math.ceil(400 / size))
    extra = {"optimizer": kind} if kind else {}
    return Arm(name, {"batch_size": size, "steps": steps}, start, extra, against)


# Questions about Reuters documents, cut to 64 tokens: 60 steps, a sixth of an epoch.
ANSWERS = Recipe("decoder", profile="mini", data="r8", padding="dynamic", batch_size=16, steps=60)
ADAPTERS = {"lora_rank": 8, "lora_targets": "all-linear"}

PLANS = (
    SweepPlan(
        name="03_freezing",
        question="What does freezing cost when each arm has its own best learning rate?",
        base=DIGITS,
        arms=(
            FULL,
            Arm("embeddings frozen", {"frozen": 0}, 1e-3),
            Arm("lower half frozen", {"frozen": 2}, 2e-3),
            Arm("head only", {"frozen": 4}, 8e-3),
        ),
        validation=600,
    ),
    SweepPlan(
        name="07_lora",
        question="Which matrices should get LoRA adapters, and of which rank?",
        base=DIGITS,
        arms=(
            FULL,
            _lora("LoRA: query and value, rank 8", ["q_proj", "v_proj"], 8, 8e-3),
            _lora("LoRA: all linear layers, rank 8", ALL_LINEAR, 8, 4e-3),
            _lora("LoRA: all linear layers, rank 2", ALL_LINEAR, 2, 4e-3),
            Arm("head only", {"frozen": 4}, 8e-3),
        ),
        validation=600,
    ),
    SweepPlan(
        name="10_batches",
        question="Does it cost accuracy to put documents of similar length into one batch?",
        base=R8,
        arms=(
            Arm("random order", {}, 5e-4, {"order": "random"}),
            Arm("bucketed, windows of 32 batches", {}, 5e-4, {"order": "bucketed"}),
            Arm("Trainer's group_by_length", {}, 5e-4, {"order": "Trainer"}),
            Arm("sorted, short to long", {}, 5e-4, {"order": "sorted"}),
            Arm("random order, in the time of bucketed", {"steps": 35}, 1e-3, {"order": "random"}),
        ),
        validation=600,
        twice=False,
        note="Documents are cut to 32 tokens, but batched by their lengths at 256 tokens. The last "
        "arm makes as many steps as fit into the time of 100 bucketed steps of 256 tokens. 100 "
        "steps are a third of an epoch; whether more steps would gain more was not tested.",
    ),
    SweepPlan(
        name="05_eight_bit",
        question="Is AdamW with 8-bit states as accurate as with 32-bit states?",
        base=DIGITS,
        arms=(
            Arm("AdamW, 32-bit states", {}, 1e-3),
            Arm("AdamW, 8-bit states", {"optimizer": "adamw8bit"}, 5e-4),
        ),
        validation=600,
    ),
    SweepPlan(
        name="05_embeddings",
        question="Do the 8-bit states of embeddings cost accuracy where zero stays zero?",
        base=R8,
        arms=(
            # The order that every arm has; named, it lets the runs of 10_batches be taken.
            Arm("AdamW, 32-bit states", {}, 1e-3, {"order": "random"}),
            Arm("8-bit states, embeddings too", {}, 1e-3, {"optimizer": "rounded"}),
        ),
        validation=600,
        twice=False,
        note="8-bit states are rounded to the nearest level, so that zero stays zero, as on a GPU: "
        "bitsandbytes on a CPU stores a tiny number. A block of 256 holds the rows of two words. "
        "100 steps are a third of an epoch.",
    ),
    SweepPlan(
        name="05_optimizers",
        question="How accurate are optimizers with smaller states, each at its own learning rate?",
        base=DIGITS,
        arms=(
            Arm("AdamW", {}, 1e-3),
            Arm("SGD with momentum", {"optimizer": "sgd"}, 6.4e-2),
            Arm("Adafactor", {"optimizer": "adafactor"}, 1.6e-2),
            Arm("Lion, 8-bit states", {"optimizer": "lion8bit"}, 1e-4),
        ),
        validation=600,
    ),
    SweepPlan(
        name="02_batch_size",
        question="How does the best learning rate grow with the batch, at equal epochs?",
        base=DIGITS,
        arms=(
            _batch("16 examples", 16, 1e-3),
            _batch("32 examples", 32, 1e-3),
            _batch("64 examples", 64, 1e-3),
        ),
        validation=600,
    ),
    SweepPlan(
        name="17_large_batch",
        question="Do LAMB and LARS beat a tuned AdamW when the batch grows, at equal epochs?",
        base=DIGITS,
        arms=(
            _batch("AdamW, 16 examples", 16, 1e-3),
            _batch("AdamW, 64 examples", 64, 1e-3),
            _batch("AdamW, 200 examples", 200, 1e-3),
            _batch("LAMB, 200 examples", 200, 1.6e-2, "lamb", "AdamW, 200 examples"),
            _batch("LARS, 200 examples", 200, 4.0, "lars", "AdamW, 200 examples"),
        ),
        validation=600,
    ),
    SweepPlan(
        name="01_pretrained",
        question="What are pretrained weights worth, when each start has its own learning rate?",
        base=DIGITS,
        arms=(
            Arm("pretrained, 400 images", {}, 1e-3),
            Arm("random weights, 400 images", {"weights": "random"}, 1e-3),
            Arm("pretrained, 100 images", {"train_size": 100}, 1e-3),
            Arm(
                "random weights, 100 images",
                {"train_size": 100, "weights": "random"},
                1e-3,
                against="pretrained, 100 images",
            ),
        ),
        validation=600,
        references=(
            "nearest neighbour of bare pixels, 400 images",
            "nearest neighbour of bare pixels, 100 images",
        ),
    ),
    SweepPlan(
        name="21_qlora",
        question="What do adapters, and weights in four bits beside them, cost in accuracy?",
        base=ANSWERS,
        arms=(
            Arm("all weights train", {}, 2e-3),
            Arm("LoRA: all linear layers, rank 8", ADAPTERS, 8e-3),
            Arm(
                "QLoRA: the same beside NF4",
                ADAPTERS | {"base": "nf4"},
                8e-3,
                against="LoRA: all linear layers, rank 8",
            ),
        ),
        validation=600,
        note="Accuracy is the share of answers that are generated right, word for word. It "
        "still rises after 60 steps: the last column says by how much with twice as many.",
    ),
    SweepPlan(
        name="27_eight_bits",
        question="What do products in FP8 cost in accuracy beside those in bf16?",
        base=replace(DIGITS, precision="bf16", steps=40, test_size=300),
        arms=(
            Arm("bf16", {}, 1e-3),
            Arm("FP8, scaled by tensor", {"float8": "tensorwise"}, 1e-3),
        ),
        validation=200,
        twice=False,
        note="A CPU computes what a GPU's products in FP8 would give, and gains no time by it.",
    ),
)
SWEEPS = {plan.name: plan for plan in PLANS}
