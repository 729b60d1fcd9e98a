"""What an evaluation keeps: the bytes of the predictions that Trainer's own evaluation returns."""

import pytest
import torch
import transformers as library

from tight_fit.models.evaluation import logits_bytes
from tight_fit.models.made import make
from tight_fit.models.step import ModelStep

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
IMAGES = {"image_size": 32, "patch_size": 8}
CASES = {
    "bert masked-lm": (library.BertConfig(**SIZES), "masked-lm", {}),
    "llama causal-lm": (library.LlamaConfig(**SIZES), "causal-lm", {}),
    "llama in bf16": (library.LlamaConfig(**SIZES), "causal-lm", {"weights": "bf16"}),
    "llama, autocast": (
        library.LlamaConfig(**SIZES),
        "causal-lm",
        {"weights": "bf16", "precision": "bf16"},
    ),
    "roberta classes": (library.RobertaConfig(**SIZES), "sequence-classification", {"classes": 7}),
    "bert tokens": (library.BertConfig(**SIZES), "token-classification", {"classes": 5}),
    "t5 seq2seq-lm": (
        library.T5Config(
            vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        ),
        "seq2seq-lm",
        {},
    ),
    "vit": (
        library.ViTConfig(**{name: SIZES[name] for name in list(SIZES)[1:5]}, **IMAGES),
        "image-classification",
        {"classes": 11},
    ),
}  # fmt: skip
EXAMPLES, LENGTH = 6, 16


def rows(step: ModelStep) -> list[dict]:
    if step.reads == "image":
        return [{"pixel_values": torch.rand(3, 32, 32), "labels": torch.tensor(1)}] * EXAMPLES
    ids = torch.ones(LENGTH, dtype=torch.long)
    each = step.kind.each == "token"
    row = {"input_ids": ids, "attention_mask": ids, "labels": ids if each else torch.tensor(1)}
    return [row] * EXAMPLES


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_what_trainer_keeps(name, tmp_path):
    config, task, fields = CASES[name]
    length = {} if task.startswith("image") else {"length": LENGTH}
    step = ModelStep(config, task=task, **length, **fields)
    kept = []

    def watched(logits, labels):
        kept.append(logits if isinstance(logits, (tuple, list)) else (logits,))
        return logits

    trainer = library.Trainer(
        make(step),
        library.TrainingArguments(
            tmp_path, report_to=[], use_cpu=True, bf16=step.precision == "bf16",
            per_device_eval_batch_size=2, disable_tqdm=True,
        ),
        eval_dataset=rows(step),
        preprocess_logits_for_metrics=watched,
        compute_metrics=lambda prediction: {},
    )  # fmt: skip
    trainer.evaluate()
    assert len(kept) == EXAMPLES // 2
    assert sum(part.nbytes for batch in kept for part in batch) == EXAMPLES * logits_bytes(step)


def test_answers_of_another_form_are_not_told():
    segmented = library.SegformerConfig(num_labels=5)
    assert logits_bytes(ModelStep(segmented, task="semantic-segmentation")) is None
