"""Answers to the exercises of notebook 22, right and wrong."""

import torch
from torch.autograd.graph import saved_tensors_hooks


def kept(function, x):
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def every_tensor(function, x):
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    return sum(sizes)


def elements(function, x):
    tensors = {}

    def pack(tensor):
        tensors[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    return sum(tensors.values())


def result(function, x):
    out = function(x)
    return out.numel() * out.element_size() if isinstance(out, torch.Tensor) else 0


RIGHT = {"22.1": 2, "22.2": 1200, "22.3": kept}
WRONG = {
    "22.1": [6, 4, 1, 0, 2.5, "2"],
    "22.2": [48, 229, 282, 1000, "1200"],
    "22.3": [every_tensor, elements, result, lambda function, x: 0, 96],
}
