"""Fine-tune a decoder on one GPU: NF4 base, LoRA beside all linear layers, a loss in chunks.

    python scripts/finetune_llm.py --model Qwen/Qwen3-8B --data answers.jsonl --out adapter

Each line of the data is {"prompt": ..., "answer": ...}; only the answer counts in the loss. Part of
the examples is held out, to evaluate. The same command with --resume goes on where it stopped, and
--merge writes a whole model in the end. Needs torch, transformers, peft, bitsandbytes and a GPU
with bf16 (a CPU will do for tiny models). The whole fine-tune is in the functions up to `finetune`;
below them is the command line.
"""

import argparse
import itertools
import json
import math
import random
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
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


def loss_sum(model, ids, labels, chunk=256):
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


@torch.no_grad()
def evaluate(model, rows):
    """The mean loss of a token of the answers of `rows`."""
    model.eval()
    total = sum(loss_sum(model, ids.to(DEVICE), labels.to(DEVICE)).item() for ids, labels in rows)
    model.train()
    return total / sum((labels[:, 1:] != -100).sum().item() for _, labels in rows)


def save(model, optimizer, out, step):
    """A folder with adapters and optimizer states, whole or not there; the older one goes."""
    states = {
        f"{place}.{name}": value
        for place, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    new = Path(tempfile.mkdtemp(dir=out, prefix=".unfinished-"))
    model.save_pretrained(new)
    save_file(states, new / "optimizer.safetensors")
    new.rename(Path(out, f"step-{step}"))
    for old in saved(out)[:-1]:
        shutil.rmtree(old)


def saved(out):
    """The folders of `save`, the last step's at the end."""
    there = (folder for folder in Path(out).glob("step-*") if folder.name[5:].isdecimal())
    return sorted(there, key=lambda folder: int(folder.name[5:]))


def restore(model, optimizer, folder):
    """Adapters and optimizer states as `save` found them; the step that follows."""
    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    states = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        place, name = key.split(".", 1)
        states.setdefault(int(place), {})[name] = value
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    return int(folder.name[5:]) + 1


def finetune(model, rows, batch, steps, rate, held=(), every=100, out=None, resume=None):
    """Train on `batch` of the encoded `rows` per step; a micro-batch of one is never padded.

    Every `every` steps and after the last one the rows of `held` are evaluated, and what is needed
    to go on is saved in `out`. `resume` is such a folder.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)
    first = restore(model, optimizer, resume) if resume else 1
    rows = itertools.islice(epochs(rows), (first - 1) * batch, None)
    for step in range(first, steps + 1):
        examples, total = list(itertools.islice(rows, batch)), 0.0
        count = sum((labels != -100).sum().item() for _, labels in examples)
        for ids, labels in examples:
            loss = loss_sum(model, ids.to(DEVICE), labels.to(DEVICE)) / count
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise SystemExit(f"The loss of step {step} is {total}: use a lower --rate.")
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:  # down to 0 along a line
            group["lr"] = rate * (1 - (step - 1) / steps)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f}", flush=True)
        if step % every == 0 or step == steps:
            if held:
                print(f"step {step}: held-out loss {evaluate(model, held):.4f}", flush=True)
            if out:
                save(model, optimizer, out, step)


def merge(name, adapter, folder):
    """A whole model in bf16: the adapters added to the weights that were not quantized.

    They were trained beside weights in 4 bits, which differ a little from these: evaluate it again.
    """
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(name).save_pretrained(folder)


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
    arguments.add_argument("--merge", metavar="FOLDER", help="write a whole model there as well")
    arguments.add_argument("--resume", action="store_true", help="go on where --out stopped")
    numbers = {"length": 2048, "rank": 16, "batch": 8, "steps": 100, "every": 100}
    for name, value in {"out": "adapter", "rate": 2e-4, "held": 0.05, **numbers}.items():
        arguments.add_argument(f"--{name}", type=type(value), default=value)
    asked = arguments.parse_args()
    for name in numbers:
        if getattr(asked, name) < 1:
            arguments.error(f"--{name} must be a whole number of at least 1.")
    if not 0 < asked.rate < 1:
        arguments.error("--rate must be a number between 0 and 1.")
    if not 0 <= asked.held < 1:
        arguments.error("--held is the part of the examples that is held out, from 0 to below 1.")
    for name in filter(None, (asked.out, asked.merge)):
        if Path(name).is_file():
            arguments.error(f"--out, --merge: {name} is a file; name a folder.")
    try:
        examples = read(asked.data)
    except (OSError, ValueError) as error:
        arguments.error(f"--data: {asked.data} cannot be used: {error}.")
    for name in filter(None, (asked.out, asked.merge)):
        try:
            Path(name).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=name).close()
        except OSError as error:
            arguments.error(f"--out, --merge: {name} cannot be written: {error.strerror}.")
    if asked.resume and not saved(asked.out):
        arguments.error(f"--resume: {asked.out} holds no step-N to go on from; leave it out.")
    if saved(asked.out) and not asked.resume:
        arguments.error(
            f"--out: {asked.out} holds {saved(asked.out)[-1].name}; give --resume to "
            "go on from it, or name another folder."
        )
    resume = saved(asked.out)[-1] if asked.resume else None
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
    random.Random(0).shuffle(rows)
    held = rows[: int(asked.held * len(rows))]
    finetune(
        model,
        rows[len(held) :],
        asked.batch,
        asked.steps,
        asked.rate,
        held,
        asked.every,
        asked.out,
        resume,
    )
    model.save_pretrained(asked.out)
    if asked.merge:
        merge(asked.model, asked.out, asked.merge)


if __name__ == "__main__":
    main()
