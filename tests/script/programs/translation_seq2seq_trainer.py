"""Fine-tune an encoder and a decoder to translate, with Seq2SeqTrainer."""

import sys

from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
english = "the ship left the port with a cargo of coffee and sugar".split()
german = "das Schiff verliess den Hafen mit einer Ladung Kaffee und Zucker".split()
pairs = [(" ".join(english[: 3 + i % 9]), " ".join(german[: 3 + i % 8])) for i in range(48)]
raw = Dataset.from_dict({"en": [pair[0] for pair in pairs], "de": [pair[1] for pair in pairs]})


def preprocess(rows):
    texts = ["translate: " + text for text in rows["en"]]
    labels = tokenizer(text_target=rows["de"], max_length=32, truncation=True)
    return {**tokenizer(texts, max_length=32, truncation=True), "labels": labels["input_ids"]}


trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        "translator", per_device_train_batch_size=8, num_train_epochs=2, max_grad_norm=0.5,
        predict_with_generate=True, report_to="none", train_sampling_strategy="sequential",
    ),
    train_dataset=raw.map(preprocess, batched=True, remove_columns=["en", "de"]),
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
)  # fmt: skip
trainer.train()
trainer.save_model()
