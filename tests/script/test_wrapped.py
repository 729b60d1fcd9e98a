"""Tensors that wrap others, as torchao's in 8 bits do: what is made inside them is counted."""

from tests.script import HEAD, run

WRAPPER = """
from torch.utils._pytree import tree_map_only


class Scaled(torch.Tensor):
    @staticmethod
    def __new__(kind, data):
        return torch.Tensor._make_wrapper_subclass(
            kind, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self.data_inside = data

    def __tensor_flatten__(self):
        return ["data_inside"], None

    @staticmethod
    def __tensor_unflatten__(inside, context, size, stride):
        return Scaled(inside["data_inside"])

    @classmethod
    def __torch_dispatch__(kind, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Scaled, lambda one: one.data_inside, (args, kwargs or {}))
        made = function(*args, **kwargs)
        return made if function is torch.ops.aten.mm.default else Scaled(made)
"""
PLAIN = """
def Scaled(data):
    return data
"""
TRAINED = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = Scaled(x) * 2, Scaled(weight) * 2  # made by an operation on what wraps them
        return torch.mm(ctx.kept[0], ctx.kept[1].t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.kept
        for_x = torch.mm(Scaled(gradient), weight) if ctx.needs_input_grad[0] else None
        return for_x, torch.mm(Scaled(gradient).t(), x)


nn.Linear.forward = lambda self, x: Product.apply(x, self.weight) + self.bias
layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to("cuda")
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for step in range(3):
    layers(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_program_that_wraps_operands_takes_what_it_takes_without(program):
    plain, wrapped = (
        run(program(HEAD + given + TRAINED), gpu="H100") for given in (PLAIN, WRAPPER)
    )
    assert plain["peak"] == wrapped["peak"] and plain["at_peak"] == wrapped["at_peak"]
