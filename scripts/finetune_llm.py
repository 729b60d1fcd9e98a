"""Fine-tune a decoder: NF4 base, LoRA beside all linear layers, a loss in chunks.

    python scripts/finetune_llm.py --model Qwen/Qwen3-8B --data answers.jsonl --out adapter
    torchrun --nproc-per-node 2 scripts/finetune_llm.py --model Qwen/Qwen3-32B --data ...

Each line of the data is {"prompt": ..., "answer": ...}; only the answer counts in the loss. Part of
the examples is held out, to evaluate. The same command with --resume goes on where it stopped, on
as many GPUs as you like, and --merge writes a whole model in the end. Under torchrun FSDP2 divides
the weights over the GPUs, and each takes its part of a batch; every process loads the whole model
into the host's memory first. --base bf16 leaves the weights in 16 bits (LoRA). Needs torch,
transformers, peft, bitsandbytes and GPUs with bf16 (CPUs will do for tiny models). The whole
fine-tune is in the functions up to `finetune`; below them is the command line.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

RANK, RANKS = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def load(name, rank, base="nf4"):
    """The tokenizer, and the model: its weights in NF4 or bf16 and frozen, adapters in fp32.

    Several processes have it on the host, from where `divide` moves one layer at a time.
    """
    tokenizer = AutoTokenizer.from_pretrained(name)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,  # bytes in the dtype that FSDP2 gathers
    )
    model = AutoModelForCausalLM.from_pretrained(
        name,
        quantization_config=nf4 if base == "nf4" else None,
        dtype=torch.bfloat16,
        device_map=DEVICE if RANKS == 1 else "cpu",
    )
    model.gradient_checkpointing_enable()
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    torch.manual_seed(0)  # the same adapters in every process
    return tokenizer, get_peft_model(model, lora).train()


class Loss(torch.nn.Module):
    """`loss_sum` as the forward pass of a module: FSDP2 gathers weights where one begins."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        return loss_sum(self.model, ids, labels)


def divide(model):
    """`loss_sum` of this model; under torchrun its weights are divided over the ranks by FSDP2."""
    loss = Loss(model)
    if RANKS > 1:
        options = {
            "mesh": init_device_mesh(DEVICE.split(":")[0], (RANKS,)),
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        for layer in model.get_base_model().model.layers:
            fully_shard(layer.to(DEVICE), **options)
        fully_shard(loss.to(DEVICE), **options)  # the rest: embeddings, head, last norm
    return loss


def whole(value):
    """A tensor with the parts of all ranks, which all must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value, divided):
    """A whole tensor, divided over the ranks as another one is."""
    if not isinstance(divided, DTensor):
        return value
    return distribute_tensor(value.to(DEVICE), divided.device_mesh, divided.placements)


def added(number):
    """A number, summed over the ranks."""
    total = torch.tensor(number, dtype=torch.float64, device=DEVICE)
    if RANKS > 1:
        dist.all_reduce(total)
    return total.item()


def tell(text):
    """Print a line of one rank."""
    if RANK == 0:
        print(text, flush=True)


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
def evaluate(loss, rows):
    """The mean loss of a token of the answers of `rows`, of which each rank takes its part.

    All ranks call the model equally often, as FSDP2 asks; what is one too many is not counted.
    """
    loss.eval()
    total = 0.0
    for first in range(0, len(rows), RANKS):
        ids, labels = rows[min(first + RANK, len(rows) - 1)]
        value = loss(ids.to(DEVICE), labels.to(DEVICE)).item()
        total += value if first + RANK < len(rows) else 0.0
    loss.train()
    return added(total) / sum((labels[:, 1:] != -100).sum().item() for _, labels in rows)


def save_adapters(model, folder):
    """The adapters, as peft reads them, written by one rank."""
    weights = {name: whole(value) for name, value in get_peft_model_state_dict(model).items()}
    if RANK == 0:
        model.save_pretrained(folder, state_dict=weights)


def save(model, optimizer, out, step):
    """A folder with adapters and optimizer states, whole or not there; the older one goes."""
    states = {
        f"{place}.{name}": whole(value)
        for place, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    new = Path(tempfile.mkdtemp(dir=out, prefix=".unfinished-")) if RANK == 0 else None
    save_adapters(model, new)
    if RANK == 0:
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
    own = get_peft_model_state_dict(model)
    weights = load_file(folder / "adapter_model.safetensors")
    set_peft_model_state_dict(model, {key: like(weights[key], own[key]) for key in weights})
    states, (group,) = {}, optimizer.param_groups
    for key, value in load_file(folder / "optimizer.safetensors").items():
        place, name = key.split(".", 1)
        part = value if name == "step" else like(value, group["params"][int(place)])
        states.setdefault(int(place), {})[name] = part
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    return int(folder.name[5:]) + 1


def finetune(model, rows, batch, steps, rate, held=(), every=100, out=None, resume=None):
    """Train on `batch` of the encoded `rows` per step; a micro-batch of one is never padded.

    Each rank takes its part of every batch, and all gradients together are those of one process.
    Every `every` steps and after the last one the rows of `held` are evaluated, and what is needed
    to go on is saved in `out`. `resume` is such a folder.
    """
    loss_of = divide(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)
    first = restore(model, optimizer, resume) if resume else 1
    rows = itertools.islice(epochs(rows), (first - 1) * batch, None)
    for step in range(first, steps + 1):
        examples, total = list(itertools.islice(rows, batch)), 0.0
        count = sum((labels != -100).sum().item() for _, labels in examples)
        for ids, labels in examples[RANK::RANKS]:
            loss = loss_of(ids.to(DEVICE), labels.to(DEVICE)) / count
            (loss * RANKS).backward()  # FSDP2 takes the mean over the ranks
            total += loss.item()
        total = added(total)
        if not math.isfinite(total):
            raise SystemExit(f"The loss of step {step} is {total}: use a lower --rate.")
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:  # down to 0 along a line
            group["lr"] = rate * (1 - (step - 1) / steps)
        optimizer.step()
        optimizer.zero_grad()
        tell(f"step {step}: loss {total:.4f}")
        if step % every == 0 or step == steps:
            if held:
                tell(f"step {step}: held-out loss {evaluate(loss_of, held):.4f}")
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
    arguments.add_argument("--base", choices=("nf4", "bf16"), default="nf4", help="frozen weights")
    numbers = {"length": 2048, "rank": 16, "batch": 8, "steps": 100, "every": 100}
    for name, value in {"out": "adapter", "rate": 2e-4, "held": 0.05, **numbers}.items():
        arguments.add_argument(f"--{name}", type=type(value), default=value)
    asked = arguments.parse_args()
    for name in numbers:
        if getattr(asked, name) < 1:
            arguments.error(f"--{name} must be a whole number of at least 1.")
    if asked.batch % RANKS:
        arguments.error(f"--batch must be a multiple of {RANKS}, the number of processes.")
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
    if RANKS > 1:
        if DEVICE != "cpu":
            torch.cuda.set_device(DEVICE)
        dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
        dist.barrier()  # nobody looks into --out once it is written to
    try:
        tokenizer, model = load(asked.model, asked.rank, asked.base)
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
    save_adapters(model, asked.out)
    if asked.merge and RANK == 0:
        merge(asked.model, asked.out, asked.merge)
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
