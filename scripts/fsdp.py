"""Fine-tune a ViT on handwritten digits with sharded parameters (FSDP2), save, and resume.

    torchrun --nproc-per-node 2 scripts/fsdp.py --save checkpoint
    torchrun --nproc-per-node 4 scripts/fsdp.py --resume checkpoint   # another number of ranks

Runs on CPUs (gloo) and on GPUs (nccl). For a full model on GPUs:
--model google/vit-base-patch16-224-in21k --bf16
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, interpolate
from transformers import ViTForImageClassification

MINI = Path(__file__).resolve().parent.parent / "helpers" / "mini" / "vit"


def digits(size):
    """1,797 images (3, size, size) in -1 to 1, and their labels."""
    raw = load_digits()
    grey = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return interpolate(grey, size).expand(-1, 3, -1, -1), torch.tensor(raw.target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MINI))
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, add up in fp32")
    parser.add_argument("--save", help="folder for a checkpoint after the last step")
    parser.add_argument("--resume", help="folder of a checkpoint to go on from")
    args = parser.parse_args()
    if args.steps < 1 or not 1 <= args.batch_size <= 1297:
        parser.error("--steps must be at least 1, and --batch-size from 1 to 1,297, all examples.")
    if args.resume and not Path(args.resume, ".metadata").is_file():
        parser.error(f"--resume: {args.resume} holds no checkpoint, or one that broke off.")
    if args.save and Path(args.save).is_file():
        parser.error(f"--save: {args.save} is a file; name a folder.")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as at the top of this file.")

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.allow_tf32 = False  # convolutions in fp32, as on a CPU
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if on_gpu else "cpu")

    torch.manual_seed(0)
    model = ViTForImageClassification.from_pretrained(
        args.model, num_labels=10, dtype=torch.float32
    )  # on the CPU: fully_shard moves one group at a time, so that the whole need not fit
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (ranks,))  # else GPUs are taken, even if they are too few
    options = {"mesh": mesh} | ({"mp_policy": policy} if args.bf16 else {})
    *layers, last = model.vit.layers
    for layer in layers:
        fully_shard(layer, **options)  # gathered and dropped one at a time
    fully_shard(last, reshard_after_forward=False, **options)  # its backward pass comes next
    fully_shard(model, **options)  # the rest: embeddings and classifier
    # After sharding: it sees shards. Fused, a step makes no copies of them.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    images, labels = digits(model.config.image_size)

    start = torch.tensor(0)
    if args.resume:  # every rank reads its own shards, however many ranks wrote them
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "step": start}
        dcp.load(state, checkpoint_id=args.resume)  # fills the tensors in place
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    start, end = int(start), int(start) + args.steps

    for step in range(start, end):
        shuffled = torch.randperm(1297, generator=torch.Generator().manual_seed(step))
        batch = shuffled[: args.batch_size]
        mine = batch[rank::ranks]
        inputs, targets = images[mine].to(device), labels[mine].to(device)
        losses = cross_entropy(model(inputs).logits.float(), targets, reduction="sum")
        loss = losses / len(batch)
        (loss * ranks).backward()  # FSDP averages over ranks, like DDP
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0 and step in (start, end - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}")

    if args.save:  # every rank writes its own shards
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "step": torch.tensor(end)}
        dcp.save(state, checkpoint_id=args.save)

    held = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    model.eval()
    with torch.no_grad():  # on every rank: the forward pass gathers the layers
        guesses = model(images[1297:].to(device)).logits.argmax(-1).cpu()
    right = (guesses == labels[1297:]).float().mean()
    print(f"rank {rank} holds {held:,} of {whole:,} parameters; accuracy {right.item():.1%}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
