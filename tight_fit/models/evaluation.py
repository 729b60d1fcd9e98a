"""What an evaluation by transformers' Trainer keeps on the GPU, which no training step shows."""

from __future__ import annotations

from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep
from tight_fit.techniques.references import TASKS

BATCH = 8  # examples of an evaluation step where nothing is said (per_device_eval_batch_size)
COPIES = 2  # of what is kept, while the next batch is added to it


def logits_bytes(step: ModelStep) -> int | None:
    """Bytes that Trainer keeps of each example it evaluates where `compute_metrics` is given.

    They are the logits, in fp32 under autocast, as accelerate makes them, else in the dtype of the
    weights; of an encoder-decoder the encoder's last states as well. They stay on the GPU until the
    evaluation ends, or `eval_accumulation_steps` moves them. None for tasks whose answer has
    another form, and for dpo and grpo, which evaluate without logits.
    """
    kind, config = step.kind, step.config
    if kind.reads == "pair" or kind.each == "pixel" or step.task in TASKS:
        return None
    text = hf_config.text_config(config)
    classes: int = step.classes or getattr(config, "num_labels", None) or 2
    width = classes if kind.classifies else int(text.vocab_size)
    numbers = width * ((step.tokens or 1) if kind.each == "token" else 1)
    if kind.reads in ("texts", "speech"):
        read = config.max_source_positions if kind.reads == "speech" else step.tokens or 1
        numbers += read * text.hidden_size
    halved = step.weights != "fp32" and step.precision not in ("bf16", "fp16")
    return numbers * (2 if halved else 4)
