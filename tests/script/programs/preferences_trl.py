"""TRL's trainers of preferences: DPO with a model for reference, KTO, and a reward."""

import sys

import trl
from datasets import Dataset
from transformers import AutoTokenizer

name, kind = sys.argv[1:]
better, worse = " closed lower as the dollar rose", " rose against most of the others"
prompts = {"prompt": ["gold futures"] * 32}
data = {
    "DPO": prompts | {"chosen": [better] * 32, "rejected": [worse] * 32},
    "KTO": prompts | {"completion": [better, worse] * 16, "label": [True, False] * 16},
    "Reward": {"chosen": ["gold futures" + better] * 32, "rejected": ["gold futures" + worse] * 32},
}
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.eos_token = tokenizer.sep_token
settings = getattr(trl, f"{kind}Config")(
    kind,
    per_device_train_batch_size=2,
    max_length=48,
    max_steps=20,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
)
trainer = getattr(trl, f"{kind}Trainer")(
    model=name,
    args=settings,
    train_dataset=Dataset.from_dict(data[kind]),
    processing_class=tokenizer,
)
trainer.train()
