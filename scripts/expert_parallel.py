"""Train a small language model with a mixture of experts, whose experts are cut over the ranks.

    torchrun --nproc-per-node 2 scripts/expert_parallel.py --experts 8 --top-k 2 --capacity 1.25

Runs on CPUs (gloo) and on GPUs (nccl). Each rank has its own examples and its own experts.
"""

import argparse
import lzma
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, one_hot

NEWS = Path(__file__).resolve().parent.parent / "helpers" / "r8" / "r8.jsonl.xz"
CONTEXT = 16  # bytes that the model sees, to predict the next one


class AllToAll(torch.autograd.Function):
    """Part r of the rows goes to rank r; the gradient travels the same way back."""

    @staticmethod
    def forward(ctx, rows):
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient)


class Experts(nn.Module):
    """A router and experts, of which each token goes to `top_k`; experts are cut over the ranks.

    Input and output are [tokens of this rank, width]. `balance` is the load-balancing loss of the
    last forward pass, this rank's part of it; `dropped` the (token, expert) pairs that were
    dropped, `sent` the bytes that this rank sends for it, forward and backward.
    """

    def __init__(self, width, hidden, experts, top_k, capacity):
        super().__init__()
        self.ranks, self.experts = dist.get_world_size(), experts
        self.top_k, self.capacity = top_k, capacity
        self.router = nn.Linear(width, experts, bias=False)
        up = torch.randn(experts, width, hidden) / width**0.5  # of all experts, from one seed
        down = torch.randn(experts, hidden, width) / hidden**0.5
        own = dist.get_rank()
        self.up = nn.Parameter(up.chunk(self.ranks)[own].clone())
        self.down = nn.Parameter(down.chunk(self.ranks)[own].clone())

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)  # [tokens, experts]
        weights, chosen = probabilities.topk(self.top_k)  # [tokens, top_k]
        weights = weights / weights.sum(-1, keepdim=True)

        seats = math.ceil(self.capacity * chosen.numel() / self.experts)  # of each expert
        wanted = one_hot(chosen.flatten(), self.experts)  # [pairs, experts]; a pair per choice
        seat = (wanted.cumsum(0) * wanted).sum(-1) - 1  # first come, first served
        served = (seat < seats).nonzero().flatten()
        place = (chosen.flatten() * seats + seat)[served]
        token = served // self.top_k
        self.dropped = chosen.numel() - len(served)

        rows = x.new_zeros(self.experts * seats, x.shape[1]).index_copy(0, place, x[token])
        rows = AllToAll.apply(rows)  # dispatch: rows of all ranks for the experts of this one
        rows = rows.unflatten(0, (self.ranks, len(self.up), seats)).transpose(0, 1)
        outputs = gelu(rows.flatten(1, 2) @ self.up) @ self.down
        outputs = outputs.unflatten(1, (self.ranks, seats)).transpose(0, 1).flatten(0, 2)
        outputs = AllToAll.apply(outputs)  # combine: back to the ranks of the tokens

        share = wanted.sum(0).to(x.dtype)  # choices of each expert, on all ranks
        dist.all_reduce(share)
        share /= share.sum()
        self.balance = self.experts * (share * probabilities.mean(0)).sum() / self.ranks
        self.sent = 4 * rows.nbytes * (self.ranks - 1) // self.ranks
        scaled = outputs[place] * weights.flatten()[served, None]
        return torch.zeros_like(x).index_add(0, token, scaled)


def language_model(args):
    torch.manual_seed(0)  # the same on all ranks, but for the experts they keep
    experts = Experts(args.width, 4 * args.width, args.experts, args.top_k, args.capacity)
    first = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, args.width)]
    return nn.Sequential(*first, nn.LayerNorm(args.width), experts, nn.Linear(args.width, 256))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2, help="experts that a token goes to")
    parser.add_argument("--capacity", type=float, default=1.25, help="1: seats for an even load")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balancing loss")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=256, help="tokens of all ranks together")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    if min(args.experts, args.width, args.batch_size, args.steps) < 1:
        parser.error("--experts, --width, --batch-size and --steps must be at least 1.")
    if args.balance < 0:
        parser.error("--balance must be at least 0.")
    if not 1 <= args.top_k <= args.experts or not 0 < args.capacity <= args.experts:
        parser.error("--top-k must be from 1 to --experts, --capacity above 0 up to --experts.")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as at the top of this file.")

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if on_gpu else "cpu")
    if args.experts % ranks:
        sys.exit(f"{args.experts} experts cannot be dealt out to {ranks} ranks evenly.")
    if args.batch_size % ranks:
        sys.exit(f"--batch-size {args.batch_size} cannot be divided by {ranks} ranks.")

    model = language_model(args).to(device)
    experts = model[4]
    shared = [p for name, p in model.named_parameters() if not name.endswith(("up", "down"))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    needed = args.steps * args.batch_size  # tokens to predict
    with lzma.open(NEWS) as news:
        text = torch.frombuffer(bytearray(news.read(needed * (CONTEXT + 1))), dtype=torch.uint8)
    text = text.unfold(0, CONTEXT + 1, CONTEXT + 1).long().to(device)  # a row per token to predict
    if len(text) < needed:
        sys.exit(f"The news have {len(text):,} tokens to predict: take fewer --steps.")

    for step in range(args.steps):
        batch = text[step * args.batch_size :][: args.batch_size].chunk(ranks)[rank]
        losses = cross_entropy(model(batch[:, :-1]), batch[:, -1], reduction="sum")
        loss = losses / args.batch_size
        (loss + args.balance * experts.balance).backward()
        for parameter in shared:  # an expert's gradient is whole: it saw all of its tokens
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        seen = torch.tensor([loss.item(), experts.balance.item(), experts.dropped], device=device)
        dist.all_reduce(seen)
        if rank == 0:
            share = seen[2].item() / (args.batch_size * args.top_k)
            print(
                f"step {step + 1}: loss {seen[0]:.4f}, balance {seen[1]:.3f}, {share:.1%} dropped"
            )
    held = experts.up.numel() + experts.down.numel()
    print(f"{held:,} parameters of experts held; {experts.sent:,} bytes sent per step for tokens")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
