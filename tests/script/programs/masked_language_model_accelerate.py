"""Train a masked language model from its configuration alone, with Accelerate."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
)

folder = sys.argv[1]
accelerator = Accelerator()
torch.manual_seed(3)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(folder))
words = "the company said it would sell its stake in the venture for cash".split()
rows = [
    tokenizer(
        " ".join(words[index % 6 :]), truncation=True, max_length=16, padding="max_length",
        return_special_tokens_mask=True,
    )
    for index in range(60)
]  # fmt: skip
collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
loader = DataLoader(rows, shuffle=True, collate_fn=collate, batch_size=6)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
progress = 0
for _epoch in range(2):
    model.train()
    total = 0
    for batch in loader:
        outputs = model(**batch)
        total += outputs.loss.detach().float()
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
        progress += 1
    print(f"perplexity {torch.exp(total / len(loader)):.2f} after {progress} steps")
accelerator.save_state("state")
