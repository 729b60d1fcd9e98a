"""TRL's DPOTrainer, which holds a copy of the model for reference."""

import sys

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

pairs = {
    "prompt": ["gold futures"] * 32,
    "chosen": [" closed lower as the dollar rose"] * 32,
    "rejected": [" rose against most of the others"] * 32,
}
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.eos_token = tokenizer.sep_token
trainer = DPOTrainer(
    model=sys.argv[1],
    args=DPOConfig(
        "dpo",
        per_device_train_batch_size=2,
        max_length=48,
        max_steps=20,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=tokenizer,
)
trainer.train()
