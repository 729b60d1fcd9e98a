"""Pretrain the mini DeBERTa-v3 and write `helpers/mini/deberta/`: weights, tokenizer, model card.

    python -m tools.pretrain.pretrain_deberta [--out DIR] [--steps N] [--objective NAME] [--compare]

The architecture is that of He et al., "DeBERTaV3" (2021), made small: disentangled attention with
relative positions only, one key for c2p and p2c, log-bucketed distances. With one thread and a
fixed seed, the weights are the same on every run on one kind of CPU.

`--compare` runs every objective for COMPARE_STEPS steps, scores it on a validation part of R8's
training split and writes `comparison.json`. Without it the model card quotes the shipped one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DebertaV2Config, get_linear_schedule_with_warmup

from helpers.models import MINI
from tight_fit.command.wrapper import run as run_command
from tools.pretrain import card, corpus, loop, lsa, objectives, score, tokenizer

FOLDER = MINI / "deberta"
COMPARED = ("mlm", "rtd", "contrastive", "mlm+contrastive")
COMPARE_STEPS = 300
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass(frozen=True)
class TextPretraining:
    """One pretraining run.

    documents  documents per step, of which each gives two crops
    length     tokens per crop
    reuters    the fraction of documents that is drawn from Reuters
    """

    objective: str = "mlm+contrastive"
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
) -> tuple[objectives.Pretrainer, list[dict]]:
    """(trained modules, losses of each step), in fp32 without dropout.

    stop  the number of steps to take of plan.steps; None takes all
    """
    torch.manual_seed(plan.seed)
    shape = config()
    shape.update(dict.fromkeys(DROPOUTS, 0.0))
    learner = objectives.Pretrainer(shape, plan.objective)
    size = shape.vocab_size, shape.hidden_size
    words = lsa.embeddings(corpora[0] + corpora[1], *size, shape.initializer_range, plan.seed)
    learner.model.deberta.embeddings.word_embeddings.weight.data.copy_(words)
    optimizer = torch.optim.AdamW(
        learner.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay
    )
    schedule = get_linear_schedule_with_warmup(
        optimizer, round(plan.warmup * plan.steps), plan.steps
    )
    generator = torch.Generator().manual_seed(plan.seed)
    losses = (learner(rows, generator) for rows in batches(corpora, plan))
    return learner, loop.optimize(learner, optimizer, schedule, losses, plan, stop)


def store(model, tok, folder: Path, half: bool = True) -> None:
    """Write weights with the MLM head, the config with DeBERTa's usual dropout, and the tokenizer.

    half  weights in fp16; False writes fp32
    """
    model.config.update({name: getattr(config(), name) for name in DROPOUTS})
    (model.half() if half else model).save_pretrained(folder)
    tok.save_pretrained(folder)


def compare(corpora: list[list[np.ndarray]], tok, folder: Path) -> None:
    """Write folder/comparison.json: validation accuracy of each objective after COMPARE_STEPS."""
    results = {}
    for name in COMPARED:
        learner, _ = train(replace(TextPretraining(), objective=name, steps=COMPARE_STEPS), corpora)
        with tempfile.TemporaryDirectory() as folder_of_fp32:
            store(learner.model, tok, Path(folder_of_fp32), half=False)
            runs = score.repeat(
                Path(folder_of_fp32),
                score.r8(Path(folder_of_fp32), "validation"),
                True,
                **score.TEXT,
            )
        results[name] = {"steps": COMPARE_STEPS, "validation": runs}
        print(name, results[name], flush=True)
    card.write_json(folder / "comparison.json", results)


def describe(folder: Path, content: dict) -> str:
    """The model card's prose around its figures."""
    compared = json.loads((folder / "comparison.json").read_text(encoding="utf8"))
    plan, text, half = content["plan"], content["corpus"], content["storage"]
    rows = [
        (f"`{name}`", str(x["steps"]), card.percent(x["validation"]))
        for name, x in compared.items()
    ]
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

From the same weights kept in float32, {score.TEXT["steps"]} steps give
{card.percent(half["float32"])}.

## Objectives compared

Each ran for the same number of steps of {2 * plan["documents"]} crops, all from the same start
(embeddings from latent semantic analysis). Then came {score.TEXT["steps"]} fine-tune steps, and the
accuracy on {score.VALIDATION} examples of R8's training split kept out of fine-tuning.
`objectives.py` says what the names mean. Random weights:
{card.percent(content["random_validation"])}.

{card.table(("objective", "steps", "validation accuracy"), rows)}

## Making of

Objective `{plan["objective"]}`, {plan["steps"]} steps of {2 * plan["documents"]} crops x
{plan["length"]} tokens in {content["seconds"]} s, seed {plan["seed"]}; {content["device"]}, torch
{content["torch"]}, transformers {content["transformers"]}. Word embeddings start from
latent semantic analysis of the corpus (`lsa.py`).

{corpus.described(text, plan["reuters"])}

{content["licence"]}
"""


def main() -> None:
    """Pretrain, score and write the mini DeBERTa-v3."""
    parser = card.parser(
        "Pretrain the mini DeBERTa-v3 on unlabelled text.", FOLDER, TextPretraining.steps
    )
    parser.add_argument(
        "--objective", default=TextPretraining.objective, help="joined by + (default: %(default)s)"
    )
    parser.add_argument("--compare", action="store_true", help="compare the objectives first")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = replace(TextPretraining(), steps=args.steps, objective=args.objective)
    args.out.mkdir(parents=True, exist_ok=True)
    text = corpus.load()
    tok = tokenizer.train(text["reuters"] + text["others"])
    corpora = corpus.encode(text, tok)
    if args.compare:
        compare(corpora, tok, args.out)
    elif args.out.resolve() != FOLDER:
        shutil.copy(FOLDER / "comparison.json", args.out)
    begin = time.perf_counter()
    learner, log = train(plan, corpora)
    seconds = round(time.perf_counter() - begin)
    with tempfile.TemporaryDirectory() as folder_of_fp32:
        store(learner.model, tok, Path(folder_of_fp32), half=False)
        full = score.repeat(
            Path(folder_of_fp32), score.r8(Path(folder_of_fp32)), True, **score.TEXT
        )
    store(learner.model, tok, args.out)
    data, check = score.r8(args.out), score.r8(args.out, "validation")
    content = {
        "plan": asdict(plan),
        "corpus": {name: len(part) for name, part in text.items()} | {"dropped": corpus.dropped()},
        "seconds": seconds,
        "first_losses": log[:20],
        "last_losses": {
            name: round(float(np.mean([x[name] for x in log[-100:]])), 3) for name in log[0]
        },
        **card.facts(learner.model, args.out),
        "scores": score.against_random(args.out, data, score.TEXT, (60, 100)),
        "random_validation": score.repeat(args.out, check, False, **score.TEXT),
        "storage": {"float32": full},
    }
    card.write_json(args.out / "card.json", content)
    card.write_text(args.out, "Mini DeBERTa-v3", describe(args.out, content))


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m tools.pretrain.pretrain_deberta"))
