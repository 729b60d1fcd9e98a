"""Answers to the exercises of notebook 23, right and wrong."""

import re
from functools import partial

from tests.exercises import mistakes

GIB = 2**30
FACTORS = {"MiB": 1, "GiB": 1024}


def fragmented(message, units=True, idle=-1):
    found = re.findall(r"([\d.]+) ([MG]iB)", message)
    sizes = [float(number) * (FACTORS[unit] if units else 1) for number, unit in found]
    return sizes[idle] >= sizes[0]


def hooks(model, wrong=""):
    """`wrong` is the mistake that it makes."""
    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}
    themselves = {id(value) for value in model.parameters()}

    def pack(tensor):
        stays = {"everything": False, "nothing": True, "no views": id(tensor) in themselves}
        if stays.get(wrong, tensor.untyped_storage().data_ptr() in weights):
            return tensor
        return tensor.to("cpu", copy=True)

    return pack, lambda tensor: tensor.half().float() if wrong == "rounded" else tensor


RIGHT = {"23.1": 2 * 8.19e9 / GIB, "23.2": fragmented, "23.3": hooks}
WRONG = {
    "23.1": [4 * 8.19e9 / GIB, 8 * 8.19e9 / GIB, 6 * 8.19e9 / GIB, 16.38, "15"],
    "23.2": [
        partial(fragmented, units=False),
        partial(fragmented, idle=2),
        lambda message: True,
        lambda message: 1,
        3,
    ],
    "23.3": [*mistakes(hooks, "everything", "nothing", "no views", "rounded"), 3],
}
