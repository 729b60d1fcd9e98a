"""A model that is compiled before Trainer puts autocast around its forward, or by Trainer."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

early = "--early" in sys.argv
sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
if early:
    model.compile()
arguments = TrainingArguments(
    "out", bf16=True, max_steps=3, report_to=[], save_strategy="no",
    per_device_train_batch_size=4, torch_compile=not early,
)  # fmt: skip
rows = [{"input_ids": row, "labels": row} for row in torch.arange(90).repeat(12, 1)]
Trainer(model, arguments, train_dataset=rows).train()
