"""TRL's RewardTrainer: a score for each answer of a pair, the better one above the other."""

import sys

from datasets import Dataset
from transformers import AutoTokenizer
from trl import RewardConfig, RewardTrainer

pairs = {
    "chosen": ["gold futures closed lower as the dollar rose"] * 32,
    "rejected": ["gold futures rose against most of the others"] * 32,
}
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.eos_token = tokenizer.sep_token
trainer = RewardTrainer(
    model=sys.argv[1],
    args=RewardConfig(
        "reward",
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
