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
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "folder or name of the model"})
    max_seq_length: int = 64


def examples():
    words = "the bank raised its rate and shares of oil fell while grain rose again".split()
    texts = [" ".join(words[: 2 + number % 12]) for number in range(64)]
    return Dataset.from_dict({"text": texts, "label": [number % 3 for number in range(64)]})


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path, num_labels=3
    )

    def preprocess(batch):
        return tokenizer(batch["text"], truncation=True, max_length=model_args.max_seq_length)

    data = examples().map(preprocess, batched=True, remove_columns=["text"])

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


if __name__ == "__main__":
    main()
