"""Data parallelism under torchrun as PyTorch's examples have it, with DDP's default buckets."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--view", action="store_true", help="gradients are views of the buckets")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1000)).to(device)
    model = DistributedDataParallel(
        model, device_ids=[local] if on_gpu else None, gradient_as_bucket_view=args.view
    )
    data = TensorDataset(torch.randn(512, 256), torch.randint(0, 1000, (512,)))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
