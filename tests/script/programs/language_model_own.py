"""Train a small GPT that is written here, from a file of tokens, with compile and autocast."""

import math
import os
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

batch_size, block_size = int(os.environ.get("BATCH", "4")), int(os.environ.get("BLOCK", "32"))
layers, heads, width, vocabulary = 2, 4, int(os.environ.get("WIDTH", "64")), 512
accumulation, eval_iters, out_dir = 2, 2, "out-gpt"
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported() else "float32"

os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
ctx = nullcontext() if dtype == "float32" else torch.autocast("cuda", dtype=getattr(torch, dtype))

with open(os.path.join(out_dir, "tokens.bin"), "wb") as file:
    np.arange(20_000, dtype=np.uint16).__mod__(vocabulary).astype(np.uint16).tofile(file)
with open(os.path.join(out_dir, "tokens.bin"), "rb") as file:
    tokens = np.frombuffer(file.read(), dtype=np.uint16)


def get_batch():
    starts = torch.randint(len(tokens) - block_size - 1, (batch_size,))
    x = torch.stack([torch.from_numpy(tokens[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack(
        [torch.from_numpy(tokens[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts]
    )
    if device == "cuda":
        return (
            x.pin_memory().to(device, non_blocking=True),
            y.pin_memory().to(device, non_blocking=True),
        )
    return x.to(device), y.to(device)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mask = torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
        self.register_buffer("mask", mask)

    def forward(self, x):
        examples, length, _ = x.size()
        q, k, v = (
            part.view(examples, length, heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(examples, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention()
        self.second = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, indices, targets):
        positions = torch.arange(indices.size(1), device=indices.device)
        x = self.tokens(indices) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, vocabulary), targets.view(-1))


model = GPT().to(device)
scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=6e-4,
    betas=(0.9, 0.95),
    fused=device == "cuda",
)
if device == "cuda":
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        x, y = get_batch()
        with ctx:
            _, loss = model(x, y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


x, y = get_batch()
best = 1e9
for iteration in range(1000):
    if iteration % 100 == 0:
        value = estimate_loss()
        if value < best and iteration > 0:
            best = value
            torch.save({"model": model.state_dict()}, os.path.join(out_dir, "ckpt.pt"))
    for _micro_step in range(accumulation):
        with ctx:
            logits, loss = model(x, y)
            loss = loss / accumulation
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iteration % 10 == 0:
        print(iteration, loss.item() * accumulation)
