"""Train a masked language model with Trainer, whose metrics need the logits of all examples."""

import sys

import torch
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        ids = torch.arange(64) + 100 + index
        return {"input_ids": ids, "labels": ids}


def accuracy(answers):
    return {"accuracy": float((answers.predictions.argmax(-1) == answers.label_ids).mean())}


trainer = Trainer(
    AutoModelForMaskedLM.from_pretrained(sys.argv[1]),
    TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=int(sys.argv[2]) if len(sys.argv) > 2 else 4,
        num_train_epochs=2,
        eval_strategy="epoch",
        eval_accumulation_steps=int(sys.argv[3]) if len(sys.argv) > 3 else None,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Rows(32),
    eval_dataset=Rows(40),
    compute_metrics=accuracy,
)
trainer.train()
