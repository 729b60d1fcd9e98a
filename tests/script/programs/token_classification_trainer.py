"""Fine-tune a tagger of words with Trainer: labels aligned with pieces, padded to the longest."""

import sys

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)

folder = sys.argv[1]
names = ["O", "B-ORG", "B-LOC"]
words = "Exxon shipped crude from Houston to Rotterdam while Shell cut output in Nigeria".split()
rows = [words[: 2 + index % 10] for index in range(48)]
raw = Dataset.from_dict({"tokens": rows, "tags": [[len(w) % 3 for w in row] for row in rows]})
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForTokenClassification.from_pretrained(
    folder, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
)


def align(batch):
    pieces = tokenizer(batch["tokens"], truncation=True, is_split_into_words=True)
    pieces["labels"] = []
    for index, tags in enumerate(batch["tags"]):
        ids, before = [], None
        for word in pieces.word_ids(index):
            ids.append(-100 if word is None or word == before else tags[word])
            before = word
        pieces["labels"].append(ids)
    return pieces


data = raw.map(align, batched=True, remove_columns=["tokens", "tags"])


def compute_metrics(prediction):
    chosen, labels = np.argmax(prediction.predictions, axis=2), prediction.label_ids
    kept = labels != -100
    return {"accuracy": float((chosen == labels)[kept].mean())}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "tagger", per_device_train_batch_size=6, max_steps=40, optim="adafactor",
        lr_scheduler_type="constant", report_to="none", train_sampling_strategy="sequential",
    ),
    train_dataset=data,
    eval_dataset=data,
    data_collator=DataCollatorForTokenClassification(tokenizer),
    compute_metrics=compute_metrics,
)  # fmt: skip
trainer.train()
