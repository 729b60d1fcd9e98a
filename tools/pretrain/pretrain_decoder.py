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
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup

from helpers.models import MINI
from tight_fit.command.wrapper import run as run_command
from tools.pretrain import card, corpus, loop, lsa, score_chat, tokenizer

FOLDER = MINI / "decoder"
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SHAPE += ("num_key_value_heads", "head_dim", "intermediate_size")
END, _, STOP, _ = range(4)  # tokens: end of a document, end of a turn


@dataclass(frozen=True)
class DecoderPretraining:
    """One pretraining run.

    rows     rows per step, each of `length` tokens: documents one after another, END between them
    reuters  the fraction of documents that is drawn from Reuters
    """

    steps: int = 800
    rows: int = 16
    length: int = 128
    reuters: float = 0.7
    learning_rate: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0


def config(vocabulary: int = tokenizer.VOCABULARY) -> Qwen3Config:
    """The shape of Qwen/Qwen3-0.6B at a 270th of its parameters.

    As there, two query heads share one head of keys and values, and the SwiGLU layer is three times
    as wide as the model. `initializer_range` is 0.02 times the square root of the ratio of hidden
    sizes, 1024 to 128, rounded, as for the mini DeBERTa.
    """
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "max_position_embeddings": tokenizer.LENGTH,
        "tie_word_embeddings": True,
        "pad_token_id": END,
        "bos_token_id": END,
        "eos_token_id": STOP,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return Qwen3Config(**shape)


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
    shape = model.config
    words = lsa.embeddings(
        corpora[0] + corpora[1],
        shape.vocab_size,
        shape.hidden_size,
        shape.initializer_range,
        plan.seed,
    )
    model.model.embed_tokens.weight.data.copy_(words)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=plan.weight_decay,
        fused=True,
    )
    schedule = get_cosine_schedule_with_warmup(
        optimizer, round(plan.warmup * plan.steps), plan.steps
    )
    losses = (
        {"loss": model(input_ids=rows, labels=rows, use_cache=False).loss}
        for rows in batches(corpora, plan)
    )
    log = loop.optimize(model, optimizer, schedule, losses, plan, stop)
    return model, [step["loss"] for step in log]


def describe(content: dict) -> str:
    """The model card's prose around its figures."""
    plan, text = content["plan"], content["corpus"]
    shape, fine_tune = content["shape"], content["fine_tune"]
    return f"""
A Qwen3 of {content["parameters"]:,} parameters ({shape["num_hidden_layers"]} layers, hidden size
{shape["hidden_size"]}, {shape["num_attention_heads"]} heads of {shape["head_dim"]} for queries and
{shape["num_key_value_heads"]} for keys and values, {shape["vocab_size"]:,} Unigram pieces, one
matrix for embeddings and logits), made by `python -m tools.pretrain.pretrain_decoder` for lessons
that must run without a GPU and without the hub. It continues text, and has seen no instruction:
what it answers before a fine-tune is no answer.

Load it as one loads Qwen/Qwen3-0.6B: it is stored in float16, so ask for float32.

```python
Qwen3ForCausalLM.from_pretrained("helpers/mini/decoder", dtype=torch.float32)
```

## Scores

How many of the {content["test_examples"]:,} test documents of Reuters R8 it answers exactly right,
when it is asked for their topic and generates the answer (`helpers/chat.py` has the words);
conversations of at most {fine_tune["length"]} tokens. Mean and standard deviation of three seeds;
batches of {fine_tune["batch_size"]}, learning rate {fine_tune["learning_rate"]}.

{card.score_table(content["scores"])}

## Making of

{plan["steps"]} steps of {plan["rows"]} rows x {plan["length"]} tokens, with the tokenizer
{content["cpu_seconds"]} s of CPU time, seed {plan["seed"]}; {content["device"]}, torch
{content["torch"]}, transformers {content["transformers"]}. The loss of the last hundred
steps is {content["last_loss"]} nats per token. Embeddings start from latent semantic
analysis of the corpus (`lsa.py`).

{corpus.described(text, plan["reuters"])}

{content["licence"]}
"""


def main() -> None:
    """Pretrain, score and write the mini decoder."""
    parser = card.parser(
        "Pretrain the mini decoder on unlabelled text.", FOLDER, DecoderPretraining.steps
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = replace(DecoderPretraining(), steps=args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    text = corpus.load()
    tok = tokenizer.train_chat(text["reuters"] + text["others"])
    model, log = train(plan, corpus.encode(text, tok))
    seconds = round(time.process_time())
    model.half().save_pretrained(args.out)
    tok.save_pretrained(args.out)
    recipe = score_chat.recipe(0, score_chat.STEPS[0])
    fine_tune = ("length", "batch_size", "learning_rate", "steps")
    content = {
        "cpu_seconds": seconds,
        "plan": asdict(plan),
        "shape": {name: getattr(model.config, name) for name in SHAPE},
        "first_losses": log[:20],
        "last_loss": round(float(np.mean(log[-100:])), 3),
        **card.facts(model, args.out),
        "fine_tune": {name: getattr(recipe, name) for name in fine_tune},
        "test_examples": len(score_chat.splits(args.out, recipe)["test"]),
        "scores": score_chat.against_random(args.out),
        "corpus": {name: len(part) for name, part in text.items()} | {"dropped": corpus.dropped()},
    }
    card.write(args.out, "Mini decoder", content, describe(content))


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m tools.pretrain.pretrain_decoder"))
