"""Fine-tune adapters beside a frozen language model, with peft."""

import sys

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
lora = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=16, lora_dropout=0.0,
    target_modules=["c_attn"], fan_in_fan_out=True,
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map=device)
model = get_peft_model(model, lora)
model.print_trainable_parameters()
texts = ["complaint: the parcel came late. label: complaint", "thanks a lot. label: none"] * 16


def collate(batch):
    rows = tokenizer(
        batch, padding="max_length", max_length=20, truncation=True, return_tensors="pt"
    )
    return {**rows, "labels": rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)}


loader = DataLoader(texts, batch_size=4, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
for _epoch in range(2):
    model.train()
    total = 0
    for batch in loader:
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        total += loss.detach().float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{total / len(loader):.3f}")
model.save_pretrained("adapters")
