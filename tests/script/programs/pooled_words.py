"""Words averaged over a text: the gradient of the embedding is not contiguous."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
words = nn.Embedding(32, 48).to(device)
head = nn.Linear(48, 4).to(device)
optimizer = torch.optim.SGD([*words.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
pool = nn.AdaptiveAvgPool1d(1)
for _step in range(10):
    ids = torch.randint(32, (16, 64)).to(device)
    pooled = pool(words(ids).transpose(1, 2)).squeeze(-1)
    loss = nn.functional.cross_entropy(head(pooled), torch.zeros(16, dtype=torch.long).to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
