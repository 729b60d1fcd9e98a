"""TRL's trainers: DPO with a model for reference, KTO, a reward, or examples (SFT) with LoRA."""

import sys

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

name, kind = sys.argv[1:]
better, worse = " closed lower as the dollar rose", " rose against most of the others"
prompts = {"prompt": ["gold futures"] * 32}
data = {
    "DPO": prompts | {"chosen": [better] * 32, "rejected": [worse] * 32},
    "KTO": prompts | {"completion": [better, worse] * 16, "label": [True, False] * 16},
    "Reward": {"chosen": ["gold futures" + better] * 32, "rejected": ["gold futures" + worse] * 32},
    "SFT": {"text": ["gold futures" + better] * 32},
}
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.eos_token = tokenizer.sep_token
settings = getattr(trl, f"{kind}Config")(
    kind, per_device_train_batch_size=2, gradient_accumulation_steps=2 if kind == "SFT" else 1,
    max_length=48, max_steps=20, bf16=False, gradient_checkpointing=False, report_to="none",
)  # fmt: skip
lora = LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM")
trainer = getattr(trl, f"{kind}Trainer")(
    model=name,
    args=settings,
    train_dataset=Dataset.from_dict(data[kind]),
    processing_class=tokenizer,
    peft_config=lora if kind == "SFT" else None,
)
trainer.train()
