"""Answers to the exercises of notebook 23, right and wrong."""

import re

GIB = 2**30
FACTORS = {"MiB": 1, "GiB": 1024}


def sizes(message):
    found = re.findall(r"([\d.]+) ([MG]iB)", message)
    return [float(number) * FACTORS[unit] for number, unit in found]


def fragmented(message):
    found = sizes(message)
    return found[-1] >= found[0]


def without_units(message):
    numbers = re.findall(r"([\d.]+) [MG]iB", message)
    return float(numbers[-1]) >= float(numbers[0])


def free_instead(message):
    found = sizes(message)
    return found[2] >= found[0]


def hooks(model):
    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in weights:
            return tensor
        return tensor.to("cpu", copy=True)

    return pack, lambda tensor: tensor


def everything(model):
    return lambda tensor: tensor.to("cpu", copy=True), lambda tensor: tensor


def nothing(model):
    return lambda tensor: tensor, lambda tensor: tensor


def no_views(model):
    weights = {id(value) for value in model.parameters()}

    def pack(tensor):
        return tensor if id(tensor) in weights else tensor.to("cpu", copy=True)

    return pack, lambda tensor: tensor


def rounded(model):
    pack, unpack = hooks(model)
    return lambda tensor: pack(tensor), lambda tensor: unpack(tensor).half().float()


RIGHT = {"23.1": 2 * 8.19e9 / GIB, "23.2": fragmented, "23.3": hooks}
WRONG = {
    "23.1": [4 * 8.19e9 / GIB, 8 * 8.19e9 / GIB, 6 * 8.19e9 / GIB, 16.38, "15"],
    "23.2": [without_units, free_instead, lambda message: True, lambda message: 1, 3],
    "23.3": [everything, nothing, no_views, rounded, 3],
}
