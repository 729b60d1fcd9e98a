"""How well the mini decoder learns to answer: scores for its model card."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from helpers import data, models
from helpers.recipe import Recipe
from helpers.train import evaluate, rows_of_step
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import learning_rate, train_step

STEPS = (60,)


def recipe(seed: int, steps: int) -> Recipe:
    """The fine-tune of the card, all test examples scored."""
    return Recipe(
        "decoder",
        data="r8",
        test_size=None,
        length=64,
        batch_size=16,
        padding="dynamic",
        learning_rate=2e-3,
        steps=steps,
        seed=seed,
    )


def splits(folder: Path, tuned: Recipe) -> dict[str, data.Encoded]:
    """The training and the test split in the words of the tokenizer in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    loaded = data.load("r8")
    return {part: data.encode(loaded[part], tuned, tokenizer) for part in ("train", "test")}


def score(folder: Path, pretrained: bool, seed: int, steps: int) -> float:
    """Accuracy by generation after one fine-tune of the weights in `folder`, or of random ones."""
    tuned = recipe(seed, steps)
    parts = splits(folder, tuned)
    torch.manual_seed(seed)
    if pretrained:
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder))
    model.config.use_cache = False
    models.prepare(model, tuned)
    optimizer = make_optimizer(model, tuned)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(tuned, step)
        rows = rows_of_step(tuned, len(parts["train"]), step)
        batches = [parts["train"].batch(part) for part in rows]
        train_step(model, optimizer, batches, sum(map(parts["train"].counted, rows)), tuned)
    return evaluate(model, parts["test"], tuned)
