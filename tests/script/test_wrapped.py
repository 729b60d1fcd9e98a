"""Products of tensors that wrap others, as torchao's in 8 bits do: what they make is counted."""

from tests.script import HEAD, run

PLAIN = f"""{HEAD}
layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to("cuda")
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for step in range(3):
    layers(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WRAPPED = """
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
        return function(*args, **kwargs)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(Scaled(x), Scaled(weight).t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        for_x = torch.mm(Scaled(gradient), Scaled(weight)) if ctx.needs_input_grad[0] else None
        return for_x, torch.mm(Scaled(gradient).t(), Scaled(x))


nn.Linear.forward = lambda self, x: Product.apply(x, self.weight) + self.bias
"""


def test_a_program_that_wraps_operands_takes_what_it_takes_without(program):
    without = PLAIN.replace("layers =", "nn.Linear.forward = PLAIN\nlayers =", 1).replace(
        "PLAIN", "lambda self, x: torch.mm(x, self.weight.t()) + self.bias"
    )
    wrapped = PLAIN.replace(HEAD, HEAD + WRAPPED, 1)
    plans = [run(program(text), gpu="H100") for text in (without, wrapped)]
    assert plans[0]["peak"] == plans[1]["peak"]
    assert plans[0]["at_peak"] == plans[1]["at_peak"]
