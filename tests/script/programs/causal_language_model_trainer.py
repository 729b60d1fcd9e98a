"""Fine-tune a causal language model with Trainer on texts joined and cut into blocks."""

import sys
from itertools import chain

from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

folder, block_size = sys.argv[1], 32
text = "gold futures closed lower as the dollar rose against most of the other currencies".split()
raw = Dataset.from_dict({"text": [" ".join(text[index % 5 :]) for index in range(80)]})
tokenizer = AutoTokenizer.from_pretrained(folder)
config = AutoConfig.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, config=config)
if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
    model.resize_token_embeddings(len(tokenizer))


def join(rows):
    joined = {name: list(chain(*rows[name])) for name in rows}
    total = len(joined["input_ids"]) // block_size * block_size
    blocks = {
        name: [ids[start : start + block_size] for start in range(0, total, block_size)]
        for name, ids in joined.items()
    }
    blocks["labels"] = blocks["input_ids"].copy()
    return blocks


tokens = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
blocks = tokens.map(join, batched=True)


def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="clm",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        save_strategy="epoch",
        report_to="none",
    ),
    train_dataset=blocks,
    eval_dataset=blocks,
    processing_class=tokenizer,
    data_collator=default_data_collator,
    preprocess_logits_for_metrics=preprocess_logits_for_metrics,
)
trainer.train()
trainer.save_model()
