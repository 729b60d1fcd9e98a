"""Fine-tune a ViT on handwritten digits with tensor parallelism: every layer cut over the ranks.

    torchrun --nproc-per-node 2 scripts/tensor_parallel.py

Runs on CPUs (gloo) and on GPUs (nccl). For a full model on GPUs:
--model google/vit-base-patch16-224-in21k
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import ViTForImageClassification

MINI = Path(__file__).resolve().parent.parent / "helpers" / "mini" / "vit"


def digits(size):
    """1,797 images (3, size, size) in -1 to 1, and their labels."""
    raw = load_digits()
    grey = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return interpolate(grey, size).expand(-1, 3, -1, -1), torch.tensor(raw.target)


def clip(groups, most):
    """Scale the gradients of all groups alike, so that their norm together is at most `most`.

    A group has DTensors only or none, as torch's functions take no mixture. Returns the norm.
    """
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.stack(norms).norm()
    for group in groups:
        clip_grads_with_norm_(group, most, norm)
    return norm


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MINI))
    parser.add_argument("--batch-size", type=int, default=32, help="the same examples on all ranks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--clip", type=float, help="the largest norm of the gradients")
    args = parser.parse_args()
    if args.steps < 1 or not 1 <= args.batch_size <= 1297:
        parser.error("--steps must be at least 1, and --batch-size from 1 to 1,297, all examples.")
    if args.clip is not None and not args.clip > 0:
        parser.error("--clip must be more than 0.")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as at the top of this file.")

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.allow_tf32 = False  # convolutions in fp32, as on a CPU
    kind = "cuda" if on_gpu else "cpu"
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(kind, (ranks,))

    torch.manual_seed(0)  # every rank starts from the same whole model and keeps its part
    model = ViTForImageClassification.from_pretrained(
        args.model, num_labels=10, dtype=torch.float32
    ).to(kind)
    if model.config.num_attention_heads % ranks:
        raise SystemExit(
            f"{model.config.num_attention_heads} heads cannot be cut over {ranks} ranks."
        )
    cuts = {
        "attention.q_proj": ColwiseParallel(),  # whole heads per rank
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.o_proj": RowwiseParallel(),  # ends with an all-reduce
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(),  # ends with an all-reduce
    }
    for layer in model.vit.layers:
        parallelize_module(layer, mesh, cuts)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": cut}, {"params": whole}], lr=1e-3)  # never mixed
    images, labels = digits(model.config.image_size)
    images, labels = images.to(kind), labels.to(kind)

    for step in range(args.steps):
        shuffled = torch.randperm(1297, generator=torch.Generator().manual_seed(step))
        batch = shuffled[: args.batch_size]  # all ranks work on the same examples
        loss = cross_entropy(model(images[batch]).logits, labels[batch])
        loss.backward()
        if args.clip is not None:
            clip([cut, whole], args.clip)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        right = (model(images[1297:]).logits.argmax(-1) == labels[1297:]).float().mean()
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    rank = dist.get_rank()
    print(f"rank {rank} holds {held:,} of {whole:,} parameters; accuracy {right.item():.1%}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
