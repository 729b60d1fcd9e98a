"""TRL's SFTTrainer with LoRA, and without a reference model."""

import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

text = "gold futures closed lower as the dollar rose against most of the other currencies"
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.eos_token = tokenizer.sep_token
trainer = SFTTrainer(
    model=sys.argv[1],
    args=SFTConfig(
        "sft",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_length=48,
        max_steps=20,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"text": [text] * 64}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM"),
)
trainer.train()
