"""Fine-tune a text classifier in a loop of its own: MODEL BATCH_SIZE."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

folder, batch_size = sys.argv[1], int(sys.argv[2])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).to(device)
words = "cocoa prices rose after the harvest failed in most of the country".split()
rows = [(" ".join(words[: 1 + index % 12]), index % 2) for index in range(40)]


def collate(rows):
    texts, labels = zip(*rows)
    batch = tokenizer(list(texts), padding="max_length", max_length=64, return_tensors="pt")
    return {**batch, "labels": torch.tensor(labels)}


loader = DataLoader(rows, batch_size=batch_size, collate_fn=collate, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
scheduler = get_linear_schedule_with_warmup(optimizer, 10, 1000)
best = float("inf")
for epoch in range(3):
    model.train()
    running = 0.0
    for batch in loader:
        batch = {name: value.to(device) for name, value in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        running += loss.item()
    print(f"epoch {epoch}: loss {running / len(loader):.4f}")
    if running < best:
        best = running
        torch.save(model.state_dict(), "best.pt")
