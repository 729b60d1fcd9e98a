"""Pretrain the mini DeBERTa-v3 and write `helpers/mini/deberta/`: weights, tokenizer, model card.

    python -m tools.pretrain.pretrain_deberta [--out DIR] [--steps N]

The architecture is that of He et al., "DeBERTaV3" (2021), made small: disentangled attention with
relative positions only, one key for c2p and p2c, log-bucketed distances. With one thread and a
fixed seed, the weights are the same on every run on one kind of CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

from helpers.models import MINI
from tight_fit.command.wrapper import run as run_command
from tools.pretrain import card, corpus, loop, lsa, objectives, score, tokenizer

FOLDER = MINI / "deberta"
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass(frozen=True)
class TextPretraining(loop.Pretraining):
    """One pretraining run.

    documents  documents per step, of which each gives two crops
    length     tokens per crop
    reuters    the fraction of documents that is drawn from Reuters
    """

    documents: int = 16
    length: int = 64
    reuters: float = 0.6


def config() -> DebertaV2Config:
    """The shape of microsoft/deberta-v3-base at a hundredth of its parameters, as it is kept.

    `initializer_range` is the hub's 0.02 times the square root of the ratio of hidden sizes, 768 to
    128. New layers then start with outputs of the same size as there, and a short fine-tune does
    not spend its steps on making them larger.
    """
    return DebertaV2Config.from_pretrained(FOLDER)


def crop(ids: np.ndarray, length: int, generator: np.random.Generator) -> np.ndarray:
    """[CLS], half to all of what fits of a document, [SEP], padding: (length,) int64."""
    most = min(len(ids), length - 2)
    size = generator.integers(most // 2, most + 1)
    start = generator.integers(0, len(ids) - size + 1)
    row = np.zeros(length, dtype=np.int64)
    row[: size + 2] = objectives.CLS, *ids[start : start + size], objectives.SEP
    return row


def batches(corpora: list[list[np.ndarray]], plan: TextPretraining) -> Iterator[torch.Tensor]:
    """Endless rows (2 * documents, length) int64; rows 2i and 2i+1 are crops of one document."""
    generator = np.random.default_rng(plan.seed)
    while True:
        rows = []
        for _ in range(plan.documents):
            chunks = corpora[0] if generator.random() < plan.reuters else corpora[1]
            ids = chunks[generator.integers(len(chunks))]
            rows += [crop(ids, plan.length, generator), crop(ids, plan.length, generator)]
        yield torch.from_numpy(np.stack(rows))


def train(
    plan: TextPretraining, corpora: list[list[np.ndarray]], stop: int | None = None
) -> tuple[DebertaV2ForMaskedLM, list[dict]]:
    """(the model, losses of each step), in fp32 without dropout.

    stop  the number of steps to take of plan.steps; None takes all
    """
    torch.manual_seed(plan.seed)
    shape = config()
    shape.update(dict.fromkeys(DROPOUTS, 0.0))
    model = DebertaV2ForMaskedLM(shape)
    words = lsa.embeddings(corpora[0] + corpora[1], shape, plan.seed)
    model.deberta.embeddings.word_embeddings.weight.data.copy_(words)
    generator = torch.Generator().manual_seed(plan.seed)
    losses = (objectives.losses(model, rows, generator) for rows in batches(corpora, plan))
    return model, loop.optimize(model, losses, plan, stop)


def store(model, tok, folder: Path) -> None:
    """Write weights in fp16 with the MLM head, the config with dropout, and the tokenizer."""
    model.config.update({name: getattr(config(), name) for name in DROPOUTS})
    model.half().save_pretrained(folder)
    tok.save_pretrained(folder)


def main() -> None:
    """Pretrain, score and write the mini DeBERTa-v3."""
    words = "Pretrain the mini DeBERTa-v3 on unlabelled text."
    plan, out = card.asked(words, FOLDER, TextPretraining())
    text = corpus.load()
    tok = tokenizer.train(text["reuters"] + text["others"])
    begin = time.perf_counter()
    model, log = train(plan, corpus.encode(text, tok))
    seconds = round(time.perf_counter() - begin)
    store(model, tok, out)
    last = {name: float(np.mean([step[name] for step in log[-100:]])) for name in log[0]}
    fine_tune = partial(score.score, out, score.r8(out), **score.TEXT)
    content = {
        "corpus": corpus.counted(text),
        "crops": 2 * plan.documents,
        "seconds": seconds,
        "first_losses": log[:20],
        "last_losses": {name: round(loss, 3) for name, loss in last.items()},
        "fine_tune": score.TEXT | {"length": score.LENGTH},
        "scores": score.against_random(fine_tune, (60, 100)),
    }
    card.write(out, "deberta", model, plan, content)


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m tools.pretrain.pretrain_deberta"))
