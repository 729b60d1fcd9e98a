"""Fine-tune a decoder on one GPU: NF4 base, LoRA beside all linear layers, a loss in chunks.

    python scripts/finetune_llm.py --model Qwen/Qwen3-8B --data answers.jsonl --out adapter

Each line of the data is {"prompt": ..., "answer": ...}; only the answer counts in the loss. Needs
torch, transformers, peft, bitsandbytes and a GPU with bf16 (a CPU will do for tiny models). The
whole fine-tune is in the functions up to `finetune`; below them is the command line.
"""

import argparse
import itertools
import json
import math
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(name, rank):
    """The tokenizer, and the model: its weights in NF4 and frozen, adapters in fp32 beside them."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        name, quantization_config=nf4, dtype=torch.bfloat16, device_map=DEVICE
    )
    model.gradient_checkpointing_enable()
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return tokenizer, get_peft_model(model, lora).train()


def encode(tokenizer, example, length):
    """(token ids, labels) of one example, both int64 [1, tokens]; -100 where the prompt is."""
    prompt = [{"role": "user", "content": example["prompt"]}]
    chat = [*prompt, {"role": "assistant", "content": example["answer"]}]
    begin = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([tokenizer.apply_chat_template(chat, return_dict=False)[:length]])
    labels = ids.clone()
    labels[:, : len(begin)] = -100
    return ids, labels


def loss_sum(model, ids, labels, chunk=1024):
    """The summed loss of the next tokens. Logits exist for `chunk` tokens at a time."""
    hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()

    def part(hidden, wanted):
        return F.cross_entropy(head(hidden).float(), wanted, reduction="sum")

    pairs = zip(hidden.split(chunk), labels[0, 1:].split(chunk))
    return sum(checkpoint(part, *pair, use_reentrant=False) for pair in pairs)


def epochs(rows, seed=0):
    """The rows without end; in each epoch all of them once, in another order."""
    shuffle = random.Random(seed)
    while True:
        yield from shuffle.sample(rows, len(rows))


def finetune(model, rows, batch, steps, rate):
    """Train on `batch` of the encoded `rows` per step; a micro-batch of one is never padded."""
    rows = epochs(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step in range(1, steps + 1):
        examples, total = list(itertools.islice(rows, batch)), 0.0
        count = sum((labels != -100).sum().item() for _, labels in examples)
        for ids, labels in examples:
            loss = loss_sum(model, ids.to(DEVICE), labels.to(DEVICE)) / count
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise SystemExit(f"The loss of step {step} is {total}: use a lower --rate.")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f}", flush=True)


# -- the command line: what is wrong is said before hours of work that could not be saved


def read(path):
    """The examples of a file, of which there is at least one. Raises ValueError, OSError."""
    examples = []
    with open(path, encoding="utf8") as file:
        for number, line in enumerate(file, 1):
            try:
                examples.append(json.loads(line))
                empty = not all(examples[-1][key].strip() for key in ("prompt", "answer"))
            except (ValueError, TypeError, KeyError, AttributeError):
                empty = True
            if empty:
                raise ValueError(f'line {number} is not {{"prompt": "...", "answer": "..."}}')
    if not examples:
        raise ValueError("it holds no examples")
    return examples


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--data", required=True)
    numbers = {"length": 2048, "rank": 16, "batch": 8, "steps": 100}
    for name, value in {"out": "adapter", "rate": 2e-4, **numbers}.items():
        arguments.add_argument(f"--{name}", type=type(value), default=value)
    asked = arguments.parse_args()
    for name in numbers:
        if getattr(asked, name) < 1:
            arguments.error(f"--{name} must be a whole number of at least 1.")
    if not 0 < asked.rate < 1:
        arguments.error("--rate must be a number between 0 and 1.")
    if Path(asked.out).is_file():
        arguments.error(f"--out: {asked.out} is a file; name a folder.")
    try:
        examples = read(asked.data)
    except (OSError, ValueError) as error:
        arguments.error(f"--data: {asked.data} cannot be used: {error}.")
    try:
        Path(asked.out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=asked.out).close()
    except OSError as error:
        arguments.error(f"--out: {asked.out} cannot be written: {error.strerror}.")
    try:
        tokenizer, model = load(asked.model, asked.rank)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        arguments.error(f"--model: {asked.model} cannot be loaded ({why}).")
    if not tokenizer.chat_template:
        arguments.error(f"--model: {asked.model} has no chat template: name a model that chats.")
    rows = [encode(tokenizer, example, asked.length) for example in examples]
    cut = sum(not (labels != -100).any() for _, labels in rows)
    if cut:
        raise SystemExit(
            f"{cut} of {len(rows)} examples have no answer left within --length {asked.length} "
            "tokens: use a larger one."
        )
    finetune(model, rows, asked.batch, asked.steps, asked.rate)
    model.save_pretrained(asked.out)


if __name__ == "__main__":
    main()
