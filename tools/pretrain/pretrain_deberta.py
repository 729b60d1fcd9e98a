"""Pretrain the mini DeBERTa-v3 and write `helpers/mini/deberta/`: weights, tokenizer, model card.

    python -m tools.pretrain.pretrain_deberta [--out DIR] [--steps N]

The architecture is that of He et al., "DeBERTaV3" (2021), made small: disentangled attention with
relative positions only, one key for c2p and p2c, log-bucketed distances. With one thread and a
fixed seed, the weights are the same on every run on one kind of CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DebertaV2Config, DebertaV2ForMaskedLM, get_linear_schedule_with_warmup

from helpers.models import MINI
from tight_fit.command.wrapper import run as run_command
from tools.pretrain import card, corpus, loop, lsa, objectives, score, tokenizer

FOLDER = MINI / "deberta"
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass(frozen=True)
class TextPretraining:
    """One pretraining run.

    documents  documents per step, of which each gives two crops
    length     tokens per crop
    reuters    the fraction of documents that is drawn from Reuters
    """

    steps: int = 1000
    documents: int = 16
    length: int = 64
    reuters: float = 0.6
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0


def config(vocabulary: int = tokenizer.VOCABULARY) -> DebertaV2Config:
    """The shape of microsoft/deberta-v3-base at a hundredth of its parameters.

    `initializer_range` is the hub's 0.02 times the square root of the ratio of hidden sizes, 768 to
    128. New layers then start with outputs of the same size as there, and a short fine-tune does
    not spend its steps on making them larger.
    """
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "relative_attention": True,
        "position_buckets": 32,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
        "max_position_embeddings": tokenizer.LENGTH,
        "pad_token_id": 0,
        "pooler_hidden_size": 128,
        "initializer_range": 0.05,
    }
    return DebertaV2Config(**shape)


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
    size = shape.vocab_size, shape.hidden_size
    words = lsa.embeddings(corpora[0] + corpora[1], *size, shape.initializer_range, plan.seed)
    model.deberta.embeddings.word_embeddings.weight.data.copy_(words)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay
    )
    schedule = get_linear_schedule_with_warmup(
        optimizer, round(plan.warmup * plan.steps), plan.steps
    )
    generator = torch.Generator().manual_seed(plan.seed)
    losses = (objectives.losses(model, rows, generator) for rows in batches(corpora, plan))
    return model, loop.optimize(model, optimizer, schedule, losses, plan, stop)


def store(model, tok, folder: Path) -> None:
    """Write weights in fp16 with the MLM head, the config with dropout, and the tokenizer."""
    model.config.update({name: getattr(config(), name) for name in DROPOUTS})
    model.half().save_pretrained(folder)
    tok.save_pretrained(folder)


def describe(content: dict) -> str:
    """The model card's prose around its figures."""
    plan, text = content["plan"], content["corpus"]
    return f"""
A DeBERTa-v3 of {content["parameters"]:,} parameters (4 layers, hidden size 128, 4 heads,
8,192 Unigram pieces), masked-LM head included, made by
`python -m tools.pretrain.pretrain_deberta` for lessons that must run without a GPU and without the
hub.

Load it as one loads microsoft/deberta-v3-base: it is stored in float16, so ask for float32.

```python
DebertaV2ForSequenceClassification.from_pretrained(
    "helpers/mini/deberta", num_labels=8, dtype=torch.float32
)
```

## Scores

Accuracy on the test split of Reuters R8 (2,189 documents, first {score.LENGTH} tokens), mean and
standard deviation of three seeds; batches of {score.TEXT["batch"]}, learning rate
{score.TEXT["learning_rate"]}.

{card.score_table(content["scores"])}

## Making of

A masked language model and contrastive crops (`objectives.py`), {plan["steps"]} steps of
{2 * plan["documents"]} crops x {plan["length"]} tokens in {content["seconds"]} s,
seed {plan["seed"]}; {content["device"]}, torch {content["torch"]}, transformers
{content["transformers"]}. Word embeddings start from latent semantic analysis
of the corpus (`lsa.py`).

{corpus.described(text, plan["reuters"])}

{content["licence"]}
"""


def main() -> None:
    """Pretrain, score and write the mini DeBERTa-v3."""
    args = card.parser(
        "Pretrain the mini DeBERTa-v3 on unlabelled text.", FOLDER, TextPretraining.steps
    ).parse_args()
    torch.set_num_threads(1)
    plan = replace(TextPretraining(), steps=args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    text = corpus.load()
    tok = tokenizer.train(text["reuters"] + text["others"])
    begin = time.perf_counter()
    model, log = train(plan, corpus.encode(text, tok))
    seconds = round(time.perf_counter() - begin)
    store(model, tok, args.out)
    content = {
        "plan": asdict(plan),
        "corpus": {name: len(part) for name, part in text.items()} | {"dropped": corpus.dropped()},
        "seconds": seconds,
        "first_losses": log[:20],
        "last_losses": {
            name: round(float(np.mean([x[name] for x in log[-100:]])), 3) for name in log[0]
        },
        **card.facts(model, args.out),
        "scores": score.against_random(args.out, score.r8(args.out), score.TEXT, (60, 100)),
    }
    card.write(args.out, "Mini DeBERTa-v3", content, describe(content))


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m tools.pretrain.pretrain_deberta"))
