"""Fine-tune a text classifier with Accelerate: prepare, accumulate, gather_for_metrics."""

import sys

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

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(42)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
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
train = DataLoader(data, shuffle=True, collate_fn=collate, batch_size=8)
evaluation = DataLoader(data, collate_fn=collate, batch_size=16)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=2)
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
    {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
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
            accelerator.backward(model(**batch).loss)
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
