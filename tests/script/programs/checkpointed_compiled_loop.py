"""A decoder with checkpointed layers, compiled, with a GradScaler or in bf16, with workers."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Decoder(nn.Module):
    def __init__(self, width=128, layers=4):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return self.head(x)


dtype = torch.float16 if "float16" in sys.argv else torch.bfloat16
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Decoder().to(device)
if device == "cuda":
    model = torch.compile(model)
tokens = TensorDataset(torch.randint(0, 1000, (256, 64)))
loader = DataLoader(tokens, batch_size=8, num_workers=2 if device == "cuda" else 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
for _ in range(3):
    for (batch,) in loader:
        batch = batch.to(device, non_blocking=True)
        with torch.autocast(device, dtype):
            logits = model(batch[:, :-1])
        targets = batch[:, 1:].reshape(-1)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
