"""Train a small residual network: warm-up, label smoothing, moving averages, amp, accuracy."""

import argparse
import math
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.body(x) + self.short(x))


def network(classes):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        Residual(16, 32, 2), Residual(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, classes),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        _, chosen = output.topk(max(topk), 1, True, True)
        correct = chosen.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100 / len(target)) for k in topk]


def train_one_epoch(model, averaged, criterion, optimizer, loader, device, epoch, args, scaler):
    model.train()
    for index, (image, target) in enumerate(loader):
        began = time.time()
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast(device.type, enabled=scaler is not None, dtype=torch.float16):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if index % 4 == 0:
            averaged.update_parameters(model)
        top1, top5 = accuracy(output, target, topk=(1, 5))
        if not math.isfinite(loss.item()):
            raise SystemExit("the loss is not finite")
        print(epoch, loss.item(), top1.item(), top5.item(), time.time() - began)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.device.startswith("cuda"):
        torch.backends.cudnn.benchmark = True
        print(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory)
    torch.manual_seed(0)
    images = torch.rand(96, 3, args.side, args.side)
    data = TensorDataset(images, torch.randint(10, (96,)))
    loader = DataLoader(data, batch_size=args.batch_size, sampler=RandomSampler(data))
    model = network(10)
    model.to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-4},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(device.type) if args.amp else None
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=2)
    main_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, main_schedule], [2])
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    for epoch in range(3):
        train_one_epoch(model, averaged, criterion, optimizer, loader, device, epoch, args, scaler)
        schedule.step()
        torch.save({"model": model.state_dict(), "epoch": epoch}, "checkpoint.pth")


if __name__ == "__main__":
    main()
