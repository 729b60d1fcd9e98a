"""Train a small GPT that is written here, from a file of tokens, with compile and autocast."""

import math
import os
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

batch_size, block_size, layers, heads, width, vocabulary = 4, 32, 2, 4, 64, 512
accumulation, out_dir = 2, "out-gpt"
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported() else "float32"

os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
ctx = nullcontext() if dtype == "float32" else torch.autocast("cuda", dtype=getattr(torch, dtype))
np.arange(20_000, dtype=np.uint16).__mod__(vocabulary).tofile(f"{out_dir}/tokens.bin")
with open(f"{out_dir}/tokens.bin", "rb") as file:
    tokens = np.frombuffer(file.read(), dtype=np.uint16)


def get_batch():
    starts = torch.randint(len(tokens) - block_size - 1, (batch_size,))
    rows = [torch.from_numpy(tokens[i : i + block_size + 1].astype(np.int64)) for i in starts]
    x, y = torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])
    if device == "cuda":
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mask = torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
        self.register_buffer("mask", mask)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x):
        examples, length, _ = x.size()
        q, k, v = (
            part.view(examples, length, heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(examples, length, width))

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
groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=device == "cuda")
if device == "cuda":
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        with ctx:
            _, loss = model(*get_batch())
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
