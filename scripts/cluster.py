"""Train a language model on all machines of a cluster; save, and go on after a failure.

    torchrun --nproc-per-node 2 scripts/cluster.py --folder checkpoints     # one machine

On each of two machines, of which one is called first and both see /shared:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # else a restart may not find the others
    torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint first:29400 scripts/cluster.py --folder /shared/checkpoints

When a file named stop appears in the folder, all ranks save after their step, and end.
cluster.sbatch makes it before the time of a Slurm job is over. Remove it before you go on.
"""

import argparse
import lzma
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

NEWS = Path(__file__).resolve().parent.parent / "helpers" / "r8" / "r8.jsonl.xz"
CONTEXT = 16  # bytes that the model sees, to predict the next one


def language_model(width):
    layers = [nn.Embedding(256, width), nn.Flatten(), nn.Linear(CONTEXT * width, 8 * width)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(8 * width, 256))


def batch_of(step, size, examples):
    """Which examples belong to a step. It depends on the step alone, not on the ranks."""
    epoch, place = divmod(step, examples // size)
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(epoch))
    return order[place * size : (place + 1) * size]


def newest(folder):
    """The newest whole checkpoint: .metadata is written last, when every rank has saved."""
    whole = [file.parent for file in Path(folder).glob("step-*/.metadata")]
    named = [path for path in whole if path.name.removeprefix("step-").isdecimal()]
    return max(named, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="for checkpoints; every machine must see it")
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="to be done in all")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--width", type=int, default=32, help="of the model")
    parser.add_argument("--lose", type=int, help="the rank that dies once, in step --at")
    parser.add_argument("--at", type=int, default=13)
    args = parser.parse_args()
    if min(args.every, args.batch_size, args.width) < 1:
        parser.error("--every, --batch-size and --width must be at least 1.")
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as at the top of this file.")

    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])  # of this rank's torchrun
    device = torch.device("cuda" if on_gpu else "cpu")

    torch.manual_seed(0)
    model = language_model(args.width).to(device)
    mesh = init_device_mesh(device.type, (ranks,))  # else GPUs are taken, even if they are too few
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the rest
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(lzma.open(NEWS).read(2**20)), dtype=torch.uint8)
    text = text.unfold(0, CONTEXT + 1, CONTEXT + 1).long().to(device)  # a row per example
    if args.batch_size > len(text):
        sys.exit(f"--batch-size {args.batch_size} is more than the {len(text)} examples.")

    done = torch.tensor(0)  # steps
    if args.folder and (found := newest(args.folder)):
        weights, states = get_state_dict(model, optimizer)
        try:  # each rank reads its own shards, however many ranks wrote them
            dcp.load({"model": weights, "optimizer": states, "step": done}, checkpoint_id=found)
        except dcp.CheckpointException as error:
            reason = str(next(iter(error.failures.values()))[0]).split(". ")[0]
            sys.exit(f"{found} is damaged or of another model ({reason}): move it away.")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    if rank == 0:
        print(f"{ranks} ranks go on after step {int(done)}")

    for step in range(int(done), args.steps):
        share = text[batch_of(step, args.batch_size, len(text))[rank::ranks]]
        logits = model(share[:, :-1])
        if (rank, step + 1, restarts) == (args.lose, args.at, 0):
            os.kill(os.getpid(), signal.SIGKILL)  # the process is gone at once, in mid-step
        losses = cross_entropy(logits, share[:, -1], reduction="sum")
        loss = losses / args.batch_size  # divide by the examples of all ranks
        (loss * ranks).backward()  # FSDP averages over ranks: undo it
        optimizer.step()
        optimizer.zero_grad()
        asked = bool(rank == 0 and args.folder and (Path(args.folder) / "stop").exists())
        told = torch.stack([loss.detach(), torch.tensor(float(asked), device=device)])
        dist.all_reduce(told)  # all ranks must agree on whether to stop
        stop = args.folder and told[1] > 0
        if rank == 0:
            print(f"step {step + 1}: loss {told[0].item():.4f}")
        if args.folder and (stop or (step + 1) % args.every == 0):  # every rank its own shards
            weights, states = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": states, "step": torch.tensor(step + 1)}
            dcp.save(state, checkpoint_id=Path(args.folder) / f"step-{step + 1}")
        if stop:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
