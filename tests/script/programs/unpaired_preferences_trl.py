"""TRL's KTOTrainer, whose answers are good or bad each by itself."""

import sys

from datasets import Dataset
from transformers import AutoTokenizer
from trl import KTOConfig, KTOTrainer

answers = {
    "prompt": ["gold futures"] * 32,
    "completion": [" closed lower as the dollar rose", " rose against most of the others"] * 16,
    "label": [True, False] * 16,
}
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.eos_token = tokenizer.sep_token
trainer = KTOTrainer(
    model=sys.argv[1],
    args=KTOConfig(
        "kto",
        per_device_train_batch_size=2,
        max_length=48,
        max_steps=20,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_dict(answers),
    processing_class=tokenizer,
)
trainer.train()
