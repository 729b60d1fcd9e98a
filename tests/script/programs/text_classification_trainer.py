"""Fine-tune a text classifier with Trainer; its arguments come from the command line."""

from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "folder or name of the model"})


model_args, training_args = HfArgumentParser(
    (ModelArguments, TrainingArguments)
).parse_args_into_dataclasses()
folder = model_args.model_name_or_path
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
words = "the bank raised its rate and shares of oil fell while grain rose again".split()
texts = [" ".join(words[: 2 + number % 12]) for number in range(64)]
data = Dataset.from_dict({"text": texts, "label": [number % 3 for number in range(64)]})
data = data.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length=64),
    batched=True,
    remove_columns=["text"],
)


def compute_metrics(prediction):
    chosen = np.argmax(prediction.predictions, axis=1)
    return {"accuracy": float((chosen == prediction.label_ids).mean())}


trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=data,
    eval_dataset=data,
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=compute_metrics,
)
result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", result.metrics)
print(trainer.evaluate())
