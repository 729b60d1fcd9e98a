"""Train a language model whose tokens are cut over the ranks, with ring attention or Ulysses.

    torchrun --nproc-per-node 2 scripts/context_parallel.py
    torchrun --nproc-per-node 2 scripts/context_parallel.py --attention ulysses

Runs on CPUs (gloo) and on GPUs (nccl). All ranks work on the same text, each on its own tokens.
"""

import argparse
import lzma
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

HELPERS = Path(__file__).resolve().parent.parent / "helpers"
SENT = {"keys and values": 0, "weights": 0}  # bytes that this rank has sent


def positions(rank, ranks, tokens, zigzag=True):
    """Which tokens of a text a rank holds; zig-zag: one part from the beginning, one from the end.

    With one part each, and a causal mask, the last rank would work most.
    """
    if not zigzag:
        return torch.arange(tokens).chunk(ranks)[rank]
    parts = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[-1 - rank]])


def pass_on(tensor):
    """Start to send to the next rank; returns what the one before sends, and how to wait for it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    SENT["keys and values"] += tensor.nbytes
    works = dist.batch_isend_irecv([send, receive])
    return received, lambda: [work.wait() for work in works]


def round_the_ring(pair):
    """Yield (whose they are, keys and values) of all ranks; the next ones travel meanwhile."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for hop in range(ranks):
        if hop + 1 < ranks:
            coming, wait = pass_on(pair)
        yield (rank - hop) % ranks, pair
        if hop + 1 < ranks:
            wait()
            pair = coming


def scores_of(query, keys, mine, theirs):
    """Scaled scores; -inf where the key is of a later token."""
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(mine[:, None] < theirs, float("-inf"))


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys and values of all ranks.

    query  [examples, heads, tokens of a rank, width]
    pair   keys and values, [2, examples, key heads, tokens of a rank, width]
    places positions of the tokens of each rank, a list of int64 [tokens of a rank]
    """

    @staticmethod
    def forward(ctx, query, pair, places):
        mine = places[dist.get_rank()]
        q = query.unflatten(1, (pair.shape[2], -1))  # [examples, key heads, group, tokens, width]
        highest = q.new_full(q.shape[:-1], float("-inf"))  # score of each query so far
        total, output = torch.zeros_like(highest), torch.zeros_like(q)
        for owner, (keys, values) in round_the_ring(pair):
            keys, values = keys.unsqueeze(2), values.unsqueeze(2)
            scores = scores_of(q, keys, mine, places[owner])
            higher = torch.maximum(highest, scores.amax(-1))
            weights, shrink = (scores - higher[..., None]).exp(), (highest - higher).exp()
            total = total * shrink + weights.sum(-1)
            output = output * shrink[..., None] + weights @ values
            highest = higher
        output = (output / total[..., None]).flatten(1, 2)
        ctx.save_for_backward(query, pair, output, highest + total.log())
        ctx.places = places
        return output

    @staticmethod
    def backward(ctx, d_output):
        query, pair, output, log_total = ctx.saved_tensors
        mine, groups = ctx.places[dist.get_rank()], (pair.shape[2], -1)
        mean = (d_output * output).sum(-1, keepdim=True).unflatten(1, groups)
        q, d_output = query.unflatten(1, groups), d_output.unflatten(1, groups)
        d_q, d_pair = torch.zeros_like(q), torch.zeros_like(pair)
        for owner, (keys, values) in round_the_ring(pair):
            keys, values = keys.unsqueeze(2), values.unsqueeze(2)
            scores = scores_of(q, keys, mine, ctx.places[owner])
            weights = (scores - log_total[..., None]).exp()  # computed again, not kept
            d_scores = weights * (d_output @ values.mT - mean) / q.shape[-1] ** 0.5
            d_q += d_scores @ keys
            d_pair[0] += (d_scores.mT @ q).sum(2)
            d_pair[1] += (weights.mT @ d_output).sum(2)
            if len(ctx.places) > 1:  # gradients travel with their keys; the last hop is home
                d_pair, wait = pass_on(d_pair)
                wait()
        return d_q.flatten(1, 2), d_pair, None


def ring(query, key, value, places):
    return RingAttention.apply(query, torch.stack([key, value]), places)


class AllToAll(torch.autograd.Function):
    """Part r of [ranks, ...] goes to rank r; the gradient travels the same way back."""

    @staticmethod
    def forward(ctx, parts):
        received, ranks = torch.empty_like(parts), dist.get_world_size()
        dist.all_to_all_single(received, parts)
        SENT["keys and values"] += parts.nbytes * (ranks - 1) // ranks  # one part stays here
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient.contiguous())


def exchange(tensor, cut, joined):
    """Give part r of dimension `cut` to rank r; join what all ranks give along `joined`."""
    parts = AllToAll.apply(torch.stack(tensor.chunk(dist.get_world_size(), cut)))
    return torch.cat(parts.unbind(), joined)


def ulysses(query, key, value, places):
    """Causal attention of a part of the heads to all tokens, whose order is that of the ranks."""
    query, key, value = (exchange(part, cut=1, joined=2) for part in (query, key, value))
    output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return exchange(output, cut=2, joined=1)


def check(args, config, ranks):
    """End with a sentence where tokens or heads cannot be dealt out to the ranks."""
    parts = 2 * ranks if args.attention == "ring" else ranks
    if args.length % parts:
        sys.exit(f"--length {args.length} cannot be cut into {parts} parts: use a multiple of it.")
    heads = config.num_key_value_heads
    if args.attention == "ulysses" and heads % ranks:
        sys.exit(f"{heads} key and value heads cannot be dealt out to {ranks} ranks: use a ring.")
    if args.attention == "sdpa" and ranks > 1:
        sys.exit(f"--attention sdpa needs all tokens on one rank, and there are {ranks}.")


def forward_and_loss(model, inputs, at, targets):
    """(summed loss, bytes of the tensors that are kept for the backward pass, without weights)."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(inputs[None], position_ids=at[None], use_cache=False).logits[0]
        loss = cross_entropy(logits.float(), targets, reduction="sum")
    return loss, sum(kept.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HELPERS / "mini" / "decoder"))
    parser.add_argument("--attention", choices=("sdpa", "ring", "ulysses"), default="ring")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if args.steps < 1 or args.length < 2:
        parser.error("--steps must be at least 1, and --length at least 2.")
    from transformers import (  # takes seconds, which the attention alone does not need
        AttentionInterface,
        AttentionMaskInterface,
        AutoModelForCausalLM,
        AutoTokenizer,
    )

    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as at the top of this file.")

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if on_gpu else "cpu")

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    check(args, model.config, ranks)
    zigzag = args.attention == "ring"
    places = [positions(r, ranks, args.length, zigzag).to(device) for r in range(ranks)]
    attend = {"ring": ring, "ulysses": ulysses}.get(args.attention)
    if attend:

        def attention(module, query, key, value, mask, **options):
            return attend(query, key, value, places).transpose(1, 2), None

        AttentionInterface.register("cut", attention)
        AttentionMaskInterface.register("cut", lambda *args, **options: None)
        model.set_attn_implementation("cut")
    needed = args.length * args.steps + 1
    with lzma.open(HELPERS / "r8" / "r8.jsonl.xz", "rt", encoding="utf8") as news:
        text = AutoTokenizer.from_pretrained(args.model)(news.read(8 * needed)).input_ids
    if len(text) < needed:
        sys.exit(f"The news have {len(text):,} tokens: use a shorter --length or fewer --steps.")
    text = torch.tensor(text[:needed], device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    at = places[rank]
    for step in range(args.steps):
        tokens = text[step * args.length :][: args.length + 1]
        losses, kept = forward_and_loss(model, tokens[at], at, tokens[at + 1])
        loss = losses / args.length
        loss.backward()
        for parameter in model.parameters():  # each rank has the gradient of its own tokens
            dist.all_reduce(parameter.grad)
            SENT["weights"] += 2 * parameter.grad.nbytes * (ranks - 1) // ranks
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    per_step = ", ".join(f"{name} {sent // args.steps:,}" for name, sent in SENT.items())
    print(f"{len(at)} tokens; {kept:,} bytes kept for the backward pass; sent per step: {per_step}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
