"""Pretrain the mini DeBERTa-v3 and write `deberta/`: weights, tokenizer, card.

    python -m helpers.mini.pretrain_deberta [--out DIR] [--steps N] [--objective NAME] [--compare]

The architecture is that of He et al., "DeBERTaV3" (2021), made small: disentangled attention with relative positions
only, c2p and p2c sharing one key, log-bucketed distances. One thread and a fixed seed: the same weights on every run on
one kind of CPU. `--compare` runs every objective for a short budget and scores it on a validation part of R8's training
split; the result is kept in the card.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import DebertaV2Config, get_linear_schedule_with_warmup

from helpers.mini import card, corpus, lsa, objectives, score, tokenizer

FOLDER = Path(__file__).parent / "deberta"


@dataclass(frozen=True)
class Plan:
    """One pretraining run. `documents` a step give two crops each; `reuters` is the share drawn from Reuters."""

    objective: str = "mlm+contrastive"
    steps: int = 3000
    documents: int = 16
    length: int = 64
    reuters: float = 0.6
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0


def config(vocabulary: int = tokenizer.VOCABULARY) -> DebertaV2Config:
    """The shape of microsoft/deberta-v3-base at a x of its parameters."""
    return DebertaV2Config(
        vocab_size=vocabulary, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        relative_attention=True, position_buckets=32, max_relative_positions=-1, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0,
        max_position_embeddings=tokenizer.LENGTH, pad_token_id=0, pooler_hidden_size=128,
        initializer_range=0.05,
    )  # fmt: skip


def crop(ids: np.ndarray, length: int, dice: np.random.Generator) -> np.ndarray:
    """[CLS], a random run of half to all that fits of a document's tokens, [SEP], padding: (length,) int64."""
    most = min(len(ids), length - 2)
    size = dice.integers(most // 2, most + 1)
    start = dice.integers(0, len(ids) - size + 1)
    row = np.zeros(length, dtype=np.int64)
    row[: size + 2] = objectives.CLS, *ids[start : start + size], objectives.SEP
    return row


def batches(rooms: list[list[np.ndarray]], plan: Plan) -> Iterator[torch.Tensor]:
    """Endless rows (2 * documents, length) int64; rows 2i and 2i+1 are crops of one document."""
    dice = np.random.default_rng(plan.seed)
    while True:
        rows = []
        for _ in range(plan.documents):
            room = rooms[0] if dice.random() < plan.reuters else rooms[1]
            ids = room[dice.integers(len(room))]
            rows += [crop(ids, plan.length, dice), crop(ids, plan.length, dice)]
        yield torch.from_numpy(np.stack(rows))


def encode(room: dict[str, list[str]], tok) -> list[list[np.ndarray]]:
    """Token ids of every chunk of at least 8 tokens: [reuters, others]."""
    return [
        [np.array(ids) for ids in tok(room[name], add_special_tokens=False, verbose=False)["input_ids"] if len(ids) >= 8]
        for name in ("reuters", "others")
    ]


def train(plan: Plan, rooms: list[list[np.ndarray]], stop: int | None = None) -> tuple[objectives.Pretrainer, list[dict]]:
    """(trained modules, losses by step) after `stop` of plan.steps steps (None: all of them). fp32, no dropout."""
    torch.manual_seed(plan.seed)
    shape = config()
    shape.hidden_dropout_prob = shape.attention_probs_dropout_prob = 0.0
    learner = objectives.Pretrainer(shape, plan.objective)
    words = lsa.embeddings(rooms[0] + rooms[1], shape.vocab_size, shape.hidden_size, shape.initializer_range, plan.seed)
    learner.model.deberta.embeddings.word_embeddings.weight.data.copy_(words)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, round(plan.warmup * plan.steps), plan.steps)
    dice = torch.Generator().manual_seed(plan.seed)
    log, begin = [], time.perf_counter()
    for step, rows in zip(range(stop or plan.steps), batches(rooms, plan)):
        losses = learner(rows, dice)
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), plan.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        log.append({name: round(loss.item(), 5) for name, loss in losses.items()})
        if step % 100 == 99:
            print(f"step {step + 1:5d}  {time.perf_counter() - begin:6.0f} s  {log[-1]}", flush=True)
    return learner, log

