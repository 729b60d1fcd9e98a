"""Pipelines of two and of three ranks, a pretended GPU each; test_pretended.py starts six ranks."""

import os
import sys

import torch
import torch.distributed as dist

from by_hand.transport import PipelineTransport

rank, stages = int(os.environ["RANK"]), int(sys.argv[1])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
mesh = dist.init_device_mesh("cuda", (6 // stages, stages), mesh_dim_names=("data", "pipeline"))
transport = PipelineTransport(mesh["pipeline"].get_group())
first = rank // stages * stages  # of this rank's pipeline
others = [stage for stage in range(stages) if stage != rank - first]
for other in others:  # every rank sends before it receives
    transport.send(torch.full((2,), float(rank), device=device), other)
got = torch.empty(2, device=device)
for other in others:
    assert transport.receive(got, other).tolist() == [float(first + other)] * 2
transport.finish()
dist.barrier()
print(f"rank {rank} heard of {len(others)} others")
os._exit(0)
