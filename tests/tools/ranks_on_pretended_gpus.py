"""Two ranks, a pretended GPU each, over NCCL as pretended; test_pretended.py starts them."""

import os

import torch
import torch.distributed as dist

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
assert dist.get_backend() == "nccl" and torch.cuda.device_count() == ranks == 2

x = torch.full((4,), float(rank + 1), device=device)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 4 and x.device == device
mean = torch.full((4,), float(rank + 1), device=device)
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
assert mean.tolist() == [1.5] * 4
parts = torch.empty(4, device=device)
dist.all_gather_into_tensor(parts, torch.full((2,), float(rank), device=device))
assert parts.tolist() == [0, 0, 1, 1]
part = torch.empty(2, device=device)
dist.reduce_scatter_tensor(part, torch.arange(4.0, device=device))
assert part.tolist() == [4.0 * rank, 4.0 * rank + 2]
told = torch.full((3,), float(rank), device=device)
dist.broadcast(told, 1)
assert told.tolist() == [1.0] * 3
dist.barrier()
try:
    dist.all_reduce(torch.ones(2))
    raise AssertionError("NCCL took a tensor of the host")
except RuntimeError as error:
    assert "No backend type associated" in str(error), error

crowded = dist.new_group(backend="nccl")
try:
    dist.all_reduce(torch.ones(1, device="cuda:0"), group=crowded)
    raise AssertionError("two ranks shared a GPU")
except RuntimeError as error:
    assert "Duplicate GPU detected" in str(error), error

# Messages in turn arrive; the pipeline's transport also lets both send first.
other = 1 - rank
got = torch.empty(2, device=device)
if rank == 0:
    dist.send(torch.ones(2, device=device), 1)
    dist.recv(got, 1)
else:
    dist.recv(got, 0)
    dist.send(got + 1, 0)
assert got.tolist() == [2.0 - rank] * 2

from torch.distributed.fsdp import fully_shard  # noqa: E402


def trained(place, examples, sharded):
    """The weights of two layers after three steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)).to(place)
    for module in (*model, model) if sharded else ():
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(examples.to(place)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [weight.full_tensor() if sharded else weight for weight in model.parameters()]
    return torch.cat([weight.detach().cpu().flatten() for weight in whole])


examples = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
alone = trained("cpu", examples, False)
assert torch.allclose(trained(device, examples[2 * rank : 2 * rank + 2], True), alone, atol=1e-5)

from by_hand.transport import PipelineTransport, ProcessGroupTransport  # noqa: E402
from tight_fit.layouts.layout import parse  # noqa: E402
from tight_fit.layouts.rank import grid_of  # noqa: E402

mesh = grid_of(parse("pipeline=2"), "cuda")
both = dist.new_group(backend="cpu:gloo,cuda:nccl")  # get_backend does not call it "nccl"
for group in (mesh["pipeline"].get_group(), both):
    transport = PipelineTransport(group)
    transport.send(torch.full((2,), float(rank), device=device), other)
    assert transport.receive(got, other).tolist() == [float(other)] * 2
    transport.finish()

plain = ProcessGroupTransport(mesh["pipeline"].get_group())
plain.send(torch.full((2,), float(rank), device=device), other)
try:
    plain.receive(got, other)
    print("both sent first, and nothing happened")
except RuntimeError as error:
    assert "both sent before they received" in str(error), error
    print("both sent first: refused")
os._exit(0)  # gloo's threads still wait for what never comes
