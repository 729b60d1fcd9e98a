"""Fine-tune an encoder and a decoder to translate, with Seq2SeqTrainer."""

import sys

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
english = "the ship left the port with a cargo of coffee and sugar".split()
german = "das Schiff verliess den Hafen mit einer Ladung Kaffee und Zucker".split()
pairs = [(" ".join(english[: 3 + i % 9]), " ".join(german[: 3 + i % 8])) for i in range(48)]
raw = Dataset.from_dict({"en": [pair[0] for pair in pairs], "de": [pair[1] for pair in pairs]})


def preprocess(rows):
    texts = ["translate: " + text for text in rows["en"]]
    inputs = tokenizer(texts, max_length=32, truncation=True)
    labels = tokenizer(text_target=rows["de"], max_length=32, truncation=True)
    inputs["labels"] = labels["input_ids"]
    return inputs


data = raw.map(preprocess, batched=True, remove_columns=["en", "de"])


def compute_metrics(prediction):
    ids = np.where(prediction.predictions != -100, prediction.predictions, 0)
    return {"length": float(np.mean([len(text) for text in tokenizer.batch_decode(ids)]))}


trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        "translator", per_device_train_batch_size=8, num_train_epochs=2, max_grad_norm=0.5,
        predict_with_generate=True, report_to="none", train_sampling_strategy="sequential",
    ),
    train_dataset=data,
    eval_dataset=data,
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
    compute_metrics=compute_metrics,
)  # fmt: skip
trainer.train()
trainer.save_model()
