"""A loss in chunks whose logits share one buffer, written by `out=` and in place."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        buffer = torch.empty(len(hidden), 4096, device=device)
        total = torch.zeros(len(hidden), device=device)
        for start in range(0, len(weight), 128):
            tile = buffer[:, :128]
            torch.mm(hidden, weight[start : start + 128].t(), out=tile)
            total += tile.sum(-1)
        ctx.save_for_backward(hidden, weight)
        return total

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        buffer = torch.empty(len(hidden), 4096, device=device)
        for_hidden, for_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(weight), 128):
            tile = buffer[:, :128]
            tile.copy_(gradient.unsqueeze(-1).expand(-1, 128))
            for_hidden.addmm_(tile, weight[start : start + 128])
            for_weight[start : start + 128].addmm_(tile.t(), hidden)
        return for_hidden, for_weight


model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
head = nn.Parameter(torch.randn(512, 64, device=device))
optimizer = torch.optim.AdamW([*model.parameters(), head])
for _step in range(10):
    hidden = model(torch.rand(128, 64, device=device))
    loss = Chunked.apply(hidden, head).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
