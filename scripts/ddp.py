"""Fine-tune a ViT on handwritten digits with data parallelism (DDP).

    torchrun --nproc-per-node 1 scripts/ddp.py      # one process
    torchrun --nproc-per-node 2 scripts/ddp.py      # two processes, the same result

Runs on CPUs (gloo) and on GPUs (nccl). For a full model on GPUs:
--model google/vit-base-patch16-224-in21k
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
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
    args = parser.parse_args()
    if args.steps < 1 or not 1 <= args.batch_size <= 1297:
        parser.error("--steps must be at least 1, and --batch-size from 1 to 1,297, all examples.")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as at the top of this file.")

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.allow_tf32 = False  # convolutions in fp32, as on a CPU
    dist.init_process_group("nccl" if on_gpu else "gloo")  # torchrun has set RANK, WORLD_SIZE ...
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if on_gpu else "cpu")

    torch.manual_seed(0)  # the same new classifier on every rank
    model = ViTForImageClassification.from_pretrained(
        args.model, num_labels=10, dtype=torch.float32
    ).to(device)
    parallel = DistributedDataParallel(model)  # averages gradients over ranks
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    images, labels = digits(model.config.image_size)

    for step in range(args.steps):
        shuffled = torch.randperm(1297, generator=torch.Generator().manual_seed(step))
        batch = shuffled[: args.batch_size]  # the same on every rank
        mine = batch[rank::ranks]  # this rank's share
        inputs, targets = images[mine].to(device), labels[mine].to(device)
        losses = cross_entropy(parallel(inputs).logits, targets, reduction="sum")
        loss = losses / len(batch)  # divide by the examples of all ranks
        (loss * ranks).backward()  # DDP divides by the number of ranks: undo it
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())  # for the log: the loss of the whole batch
        if rank == 0 and step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}")

    if rank == 0:  # every rank has the same weights: one evaluates, one saves
        model.eval()
        with torch.no_grad():
            guesses = model(images[1297:].to(device)).logits.argmax(-1).cpu()
        right = (guesses == labels[1297:]).float().mean()
        print(f"accuracy {right.item():.1%} ({ranks} x {len(mine)} examples per step)")
    dist.barrier()  # wait for rank 0 before the connections close
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
