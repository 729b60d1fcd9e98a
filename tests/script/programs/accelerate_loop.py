"""Fine-tune a text classifier with Accelerate: prepare, accumulate, gather_for_metrics."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_scheduler,
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--mixed_precision", default="no")
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
    )
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    words = "wheat exports to the region were lower than in the same month of last year".split()
    texts = [" ".join(words[: 1 + index % 15]) for index in range(64)]
    raw = Dataset.from_dict({"text": texts, "labels": [index % 2 for index in range(64)]})
    with accelerator.main_process_first():
        data = raw.map(
            lambda rows: tokenizer(rows["text"], padding="max_length", max_length=24),
            batched=True,
            remove_columns=["text"],
        )
    collate = DataCollatorWithPadding(tokenizer)
    train = DataLoader(
        data, shuffle=True, collate_fn=collate, batch_size=args.per_device_train_batch_size
    )
    evaluation = DataLoader(data, collate_fn=collate, batch_size=16)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model_name_or_path, num_labels=2
    )
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [
                p for n, p in model.named_parameters() if not any(name in n for name in no_decay)
            ],
            "weight_decay": 0.01,
        },
        {
            "params": [
                p for n, p in model.named_parameters() if any(name in n for name in no_decay)
            ],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=100)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(
        model, optimizer, train, evaluation, schedule
    )
    for epoch in range(2):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for batch in evaluation:
            with torch.no_grad():
                logits = model(**batch).logits
            chosen, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            right += (chosen == labels).sum().item()
        accelerator.print(f"epoch {epoch}: {right / len(data):.3f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("accelerated")


if __name__ == "__main__":
    main()
