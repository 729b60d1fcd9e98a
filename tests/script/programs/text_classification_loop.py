"""Fine-tune a text classifier in a loop of its own, on whatever device there is."""

import argparse

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count):
        words = "cocoa prices rose after the harvest failed in most of the country".split()
        self.rows = [(" ".join(words[: 1 + index % 12]), index % 2) for index in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--fixed", action="store_true", help="pad every batch to max_length")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    config = AutoConfig.from_pretrained(args.model, num_labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, config=config)
    model.to(device)

    def collate(rows):
        batch = tokenizer(
            [text for text, _ in rows],
            padding="max_length" if args.fixed else True,
            truncation=True,
            max_length=args.max_length,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor([label for _, label in rows])
        return batch

    loader = DataLoader(
        Sentences(args.examples), batch_size=args.batch_size, collate_fn=collate, drop_last=True
    )
    optimizer = AdamW(model.parameters(), lr=5e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, 1000)
    best = float("inf")
    for epoch in range(3):
        model.train()
        running = 0.0
        for batch in loader:
            batch = {name: value.to(device) for name, value in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
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


if __name__ == "__main__":
    main()
