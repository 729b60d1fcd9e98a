"""Train a generator and a discriminator in turn, each with an optimizer of its own."""

import torch
from torch import nn

device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
noise_size, batch_size = 16, 8
generator = nn.Sequential(
    nn.Linear(noise_size, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(True),
    nn.Linear(64, 192), nn.Tanh(), nn.Unflatten(1, (3, 8, 8)),
).to(device)  # fmt: skip
discriminator = nn.Sequential(
    nn.Flatten(), nn.Linear(192, 96, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Linear(96, 1)
).to(device)
criterion = nn.BCEWithLogitsLoss()
fixed = torch.randn(batch_size, noise_size, device=device)
first = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
second = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
pictures = [torch.rand(batch_size, 3, 8, 8) * 2 - 1 for _ in range(6)]
for epoch in range(3):
    for picture in pictures:
        discriminator.zero_grad()
        real = picture.to(device)
        label = torch.full((batch_size, 1), 1.0, device=device)
        on_real = criterion(discriminator(real), label)
        on_real.backward()
        fake = generator(torch.randn(batch_size, noise_size, device=device))
        label.fill_(0.0)
        on_fake = criterion(discriminator(fake.detach()), label)
        on_fake.backward()
        first.step()
        generator.zero_grad()
        label.fill_(1.0)
        loss = criterion(discriminator(fake), label)
        loss.backward()
        second.step()
    with torch.no_grad():
        shown = generator(fixed).detach().cpu()
    print(epoch, (on_real + on_fake).item(), loss.item(), tuple(shown.shape))
