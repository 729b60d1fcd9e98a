"""Fine-tune adapters beside a frozen language model, with peft."""

import sys

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, device_map=device)
model = get_peft_model(
    model,
    LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=16, lora_dropout=0.0,
        target_modules=["c_attn"], fan_in_fan_out=True,
    ),
)  # fmt: skip
model.print_trainable_parameters()
texts = ["complaint: the parcel came late. label: complaint", "thanks a lot. label: none"] * 16
encoded = tokenizer(texts, padding="max_length", max_length=20, truncation=True)
rows = [
    {name: encoded[name][index] for name in ("input_ids", "attention_mask")}
    for index in range(len(texts))
]


def collate(batch):
    ids = torch.tensor([row["input_ids"] for row in batch])
    mask = torch.tensor([row["attention_mask"] for row in batch])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


loader = DataLoader(rows, batch_size=4, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
for _epoch in range(2):
    model.train()
    total = 0
    for batch in loader:
        batch = {name: value.to(device) for name, value in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        total += loss.detach().float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{total / len(loader):.3f}")
model.save_pretrained("adapters")
