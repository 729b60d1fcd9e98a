"""A model that is compiled before Trainer puts autocast around its forward, or by Trainer."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--early", action="store_true")
early = parser.parse_args().early
config = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)
if early:
    model.compile()
ids = torch.arange(90).repeat(12, 1)
arguments = TrainingArguments(
    "out",
    bf16=True,
    max_steps=3,
    report_to=[],
    save_strategy="no",
    per_device_train_batch_size=4,
    torch_compile=not early,
)
rows = [{"input_ids": row, "labels": row} for row in ids]
Trainer(model, arguments, train_dataset=rows).train()
