"""Answers to the exercises of notebook 26, right and wrong."""

import torch
import torch.nn.functional as F


def dpo(own, reference, beta):
    chosen, rejected = (own - reference).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def without_reference(own, reference, beta):
    chosen, rejected = own.chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def one_after_another(own, reference, beta):
    gained = own - reference
    return -F.logsigmoid(beta * (gained[::2] - gained[1::2])).mean()


def advantages(rewards, group):
    rows = rewards.view(-1, group)
    above = rows - rows.mean(1, keepdim=True)
    return (above / (rows.std(1, keepdim=True) + 1e-4)).flatten()


def of_all(rewards, group):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def not_scaled(rewards, group):
    rows = rewards.view(-1, group)
    return (rows - rows.mean(1, keepdim=True)).flatten()


def divided_by_zero(rewards, group):
    rows = rewards.view(-1, group)
    return ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)).flatten()


def across(rewards, group):
    rows = rewards.view(group, -1).T
    above = rows - rows.mean(1, keepdim=True)
    return (above / (rows.std(1, keepdim=True) + 1e-4)).T.flatten()


RIGHT = {"26.1": 8 * 2**30, "26.2": dpo, "26.3": advantages}
WRONG = {
    "26.1": [4 * 2**30, 8, 2**37, 131072, "8"],
    "26.2": [
        without_reference, one_after_another, 0.5, lambda *given: 0.5,
        lambda own, reference, beta: dpo(own, reference, beta) * (len(own) // 2),
        lambda own, reference, beta: dpo(reference, own, beta),
    ],
    "26.3": [of_all, not_scaled, divided_by_zero, across, torch.zeros(8), lambda *given: 0],
}  # fmt: skip
