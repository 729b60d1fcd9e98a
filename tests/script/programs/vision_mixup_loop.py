"""Train an image model with mixed examples, soft targets, channels-last layout and averages."""

import copy
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(7)
classes, accumulation = 8, 2


class Patches(nn.Module):
    def __init__(self, width=48, depth=2, side=24):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, (side // 4) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 96, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.layers(x).mean(1))


def mixed(images, targets, alpha=0.8):
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    one_hot = F.one_hot(targets, classes).float()
    return (
        images * share + images.flip(0) * (1 - share),
        one_hot * share + one_hot.flip(0) * (1 - share),
    )


model = Patches().to(device, memory_format=torch.channels_last)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
data = TensorDataset(torch.rand(64, 3, 24, 24), torch.arange(64) % classes)
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=int(os.environ.get("WORKERS", 0)))
updates = 0
for epoch in range(4):
    model.train()
    for index, (images, targets) in enumerate(loader):
        images = images.to(device).contiguous(memory_format=torch.channels_last)
        images, soft = mixed(images, targets.to(device))
        loss = torch.sum(-soft * F.log_softmax(model(images), dim=-1), dim=-1).mean()
        (loss / accumulation).backward()
        if (index + 1) % accumulation == 0:
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters()):
                    old.lerp_(new, 0.1)
    if device.type == "cuda":
        torch.cuda.synchronize()
        print(torch.cuda.max_memory_allocated() / 2**20)
    print(epoch, updates, loss.item())
