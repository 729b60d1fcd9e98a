"""What an evaluation keeps: the bytes of the predictions that Trainer's own evaluation returns."""

import pytest
import torch
import transformers as library

from tests.small import configured
from tight_fit.models.evaluation import logits_bytes
from tight_fit.models.made import make
from tight_fit.models.step import ModelStep

SIZES = 32, 2, 4, 64, 128
LLAMA = configured(library.LlamaConfig, *SIZES)
T5 = library.T5Config(
    vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
)
VIT = configured(library.ViTConfig, *SIZES, image_size=32, patch_size=8)
CASES = {
    "llama": (LLAMA, "causal-lm", {}),
    "llama in bf16": (LLAMA, "causal-lm", {"weights": "bf16"}),
    "llama, autocast": (LLAMA, "causal-lm", {"weights": "bf16", "precision": "bf16"}),
    "bert": (
        configured(library.BertConfig, *SIZES), "sequence-classification", {"classes": 7},
    ),
    "t5": (T5, "seq2seq-lm", {}),
    "vit": (VIT, "image-classification", {"classes": 11}),
}  # fmt: skip
EXAMPLES, LENGTH = 6, 16


def row(step: ModelStep) -> dict:
    if step.reads == "image":
        return {"pixel_values": torch.rand(3, 32, 32), "labels": torch.tensor(1)}
    ids = torch.ones(LENGTH, dtype=torch.long)
    each = step.kind.each == "token"
    return {"input_ids": ids, "attention_mask": ids, "labels": ids if each else torch.tensor(1)}


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_what_trainer_keeps(name, tmp_path):
    config, task, fields = CASES[name]
    length = {} if name == "vit" else {"length": LENGTH}
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
        eval_dataset=[row(step)] * EXAMPLES,
        preprocess_logits_for_metrics=watched,
        compute_metrics=lambda prediction: {},
    )  # fmt: skip
    trainer.evaluate()
    assert len(kept) == EXAMPLES // 2
    assert sum(part.nbytes for batch in kept for part in batch) == EXAMPLES * logits_bytes(step)


def test_answers_of_another_form_are_not_told():
    segmented = library.SegformerConfig(num_labels=5)
    assert logits_bytes(ModelStep(segmented, task="semantic-segmentation")) is None
