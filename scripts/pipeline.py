"""Fine-tune a ViT on handwritten digits with pipeline parallelism: half of the layers per rank.

    torchrun --nproc-per-node 2 scripts/pipeline.py --schedule 1f1b

Runs on CPUs (gloo) and on GPUs (nccl). For a full model on GPUs:
--model google/vit-base-patch16-224-in21k --bf16
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import ViTForImageClassification

MINI = Path(__file__).resolve().parent.parent / "helpers" / "mini" / "vit"
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def digits(size):
    """1,797 images (3, size, size) in -1 to 1, and their labels."""
    raw = load_digits()
    grey = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return interpolate(grey, size).expand(-1, 3, -1, -1), torch.tensor(raw.target)


class Stage(nn.Module):
    """The layers of one rank; the first also has the embeddings, the last the classifier."""

    def __init__(self, model, rank, ranks, bf16=False):
        super().__init__()
        layers = model.vit.layers
        share = range(rank * len(layers) // ranks, (rank + 1) * len(layers) // ranks)
        self.layers = nn.ModuleList(layers[i] for i in share)
        self.embeddings = model.vit.embeddings if rank == 0 else None
        last = rank == ranks - 1
        self.head = nn.ModuleList([model.vit.layernorm, model.classifier]) if last else None
        self.bf16 = bf16

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            return self.compute(x)

    def compute(self, x):
        if self.embeddings is not None:
            x = self.embeddings(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is not None:
            norm, classifier = self.head
            x = classifier(norm(x)[:, 0]).float()  # the loss is in fp32
        return x


def clip(module, most):
    """Scale the gradients, so that their norm over all stages is at most `most`: what
    `clip_grad_norm_` does to the whole model. Returns the norm before.
    """
    square = get_total_norm([p.grad for p in module.parameters() if p.grad is not None]).square()
    dist.all_reduce(square)  # of this stage before, now of all
    clip_grads_with_norm_(module.parameters(), most, square.sqrt())
    return square.sqrt()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MINI))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, weights in fp32")
    parser.add_argument("--clip", type=float, help="the largest norm of the gradients")
    args = parser.parse_args()
    if args.steps < 1 or not 1 <= args.batch_size <= 1297:
        parser.error("--steps must be at least 1, and --batch-size from 1 to 1,297, all examples.")
    if args.micro_batches < 1 or args.batch_size % args.micro_batches:
        parser.error("--micro-batches must divide --batch-size, so that all are of one size.")
    if args.clip is not None and not args.clip > 0:
        parser.error("--clip must be more than 0.")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as at the top of this file.")

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.allow_tf32 = False  # convolutions in fp32, as on a CPU
    device = torch.device("cuda" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.schedule == "1f1b" and args.micro_batches < ranks:
        sys.exit(f"1f1b needs a micro-batch per rank: --micro-batches {ranks} or more.")

    torch.manual_seed(0)
    whole = ViTForImageClassification.from_pretrained(
        args.model, num_labels=10, dtype=torch.float32
    )
    module = Stage(whole, rank, ranks, args.bf16).to(device)
    stage = PipelineStage(module, rank, ranks, device)
    schedule = SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    images, labels = digits(whole.config.image_size)
    images, labels = images.to(device), labels.to(device)

    for step in range(args.steps):
        shuffled = torch.randperm(1297, generator=torch.Generator().manual_seed(step))
        batch = shuffled[: args.batch_size]
        losses = []
        inputs = [images[batch]] if rank == 0 else []  # the others receive activations
        targets = {"target": labels[batch], "losses": losses} if rank == ranks - 1 else {}
        # All micro-batches, forward and backward. Outputs would be all logits, on the last rank.
        schedule.step(*inputs, **targets, return_outputs=False)
        if args.clip is not None:
            clip(module, args.clip)  # torch.distributed.pipelining has nothing for it
        optimizer.step()
        optimizer.zero_grad()
        if losses and step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.4f}")

    held, total = (sum(p.numel() for p in part.parameters()) for part in (module, whole))
    print(f"rank {rank} holds {held:,} of {total:,} parameters")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
