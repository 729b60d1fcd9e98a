"""Train with Fabric: set up model, optimizer and loader, and let it run the backward pass."""

import sys

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="auto", devices=1, precision=sys.argv[1] if sys.argv[1:] else "32-true")
fabric.launch()
fabric.seed_everything(1)
with fabric.init_module():
    model = nn.Sequential(
        nn.Linear(32, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 128), nn.Linear(128, 5)
    )
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
data = TensorDataset(torch.rand(80, 32), torch.arange(80) % 5)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16))
for epoch in range(3):
    for features, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), target)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    fabric.print(f"{epoch}: {fabric.all_reduce(loss).item():.3f}")
fabric.save("fabric.ckpt", {"model": model})
