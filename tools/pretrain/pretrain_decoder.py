"""Pretrain the mini decoder and write `helpers/mini/decoder/`: weights, tokenizer, model card.

    python -m tools.pretrain.pretrain_decoder [--out DIR] [--steps N]

The architecture is that of Qwen3 (Yang et al. 2025, https://arxiv.org/abs/2505.09388), made small:
RMSNorm, also on queries and keys, SwiGLU, grouped-query attention, rotary positions, and one matrix
for embeddings and logits. It learns to predict the next token of running text, and sees no
instruction. With one thread and a fixed seed, the weights are the same on every run on one kind of
CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

from helpers.models import MINI
from tight_fit.command.wrapper import run as run_command
from tools.pretrain import card, corpus, loop, lsa, score, score_chat, tokenizer

FOLDER = MINI / "decoder"
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SHAPE += ("num_key_value_heads", "head_dim", "intermediate_size")
END = 0  # the token at the end of a document


@dataclass(frozen=True)
class DecoderPretraining(loop.Pretraining):
    """One pretraining run.

    rows     rows per step, each of `length` tokens: documents one after another, END between them
    reuters  the fraction of documents that is drawn from Reuters
    """

    steps: int = 800
    learning_rate: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    rows: int = 16
    length: int = 128
    reuters: float = 0.7


def config() -> Qwen3Config:
    """The shape of Qwen/Qwen3-0.6B at a 270th of its parameters, as it is kept.

    As there, two query heads share one head of keys and values, and the SwiGLU layer is three times
    as wide as the model. `initializer_range` is 0.02 times the square root of the ratio of hidden
    sizes, 1024 to 128, rounded, as for the mini DeBERTa.
    """
    return Qwen3Config.from_pretrained(FOLDER)


def batches(corpora: list[list[np.ndarray]], plan: DecoderPretraining) -> Iterator[torch.Tensor]:
    """Endless rows (rows, length) int64 of documents drawn at random, cut where a row ends."""
    generator = np.random.default_rng(plan.seed)
    stream = np.zeros(0, dtype=np.int64)
    size = plan.rows * plan.length
    while True:
        parts = [stream]
        while sum(map(len, parts)) < size:
            chunks = corpora[0] if generator.random() < plan.reuters else corpora[1]
            parts += [np.array([END]), chunks[generator.integers(len(chunks))]]
        joined = np.concatenate(parts)
        yield torch.from_numpy(joined[:size].reshape(plan.rows, plan.length))
        stream = joined[size:]


def train(
    plan: DecoderPretraining, corpora: list[list[np.ndarray]], stop: int | None = None
) -> tuple[Qwen3ForCausalLM, list[float]]:
    """(the model, the mean loss of each step in nats per token), in fp32.

    stop  the number of steps to take of plan.steps; None takes all
    """
    torch.manual_seed(plan.seed)
    model = Qwen3ForCausalLM(config()).train()
    words = lsa.embeddings(corpora[0] + corpora[1], model.config, plan.seed)
    model.model.embed_tokens.weight.data.copy_(words)
    losses = (
        {"loss": model(input_ids=rows, labels=rows, use_cache=False).loss}
        for rows in batches(corpora, plan)
    )
    schedule = get_cosine_schedule_with_warmup
    log = loop.optimize(model, losses, plan, stop, schedule, betas=(0.9, 0.95), fused=True)
    return model, [step["loss"] for step in log]


def main() -> None:
    """Pretrain, score and write the mini decoder."""
    words = "Pretrain the mini decoder on unlabelled text."
    plan, out = card.asked(words, FOLDER, DecoderPretraining())
    text = corpus.load()
    tok = tokenizer.train_chat(text["reuters"] + text["others"])
    model, log = train(plan, corpus.encode(text, tok))
    seconds = round(time.process_time())
    model.half().save_pretrained(out)
    tok.save_pretrained(out)
    recipe = score_chat.recipe(0, score_chat.STEPS[0])
    fine_tune = ("length", "batch_size", "learning_rate", "steps")
    content = {
        "cpu_seconds": seconds,
        "shape": {name: getattr(model.config, name) for name in SHAPE},
        "first_losses": log[:20],
        "last_loss": round(float(np.mean(log[-100:])), 3),
        "fine_tune": {name: getattr(recipe, name) for name in fine_tune},
        "test_examples": len(score_chat.splits(out, recipe)["test"]),
        "scores": score.against_random(partial(score_chat.score, out), score_chat.STEPS),
        "corpus": corpus.counted(text),
    }
    card.write(out, "decoder", model, plan, content)


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m tools.pretrain.pretrain_decoder"))
