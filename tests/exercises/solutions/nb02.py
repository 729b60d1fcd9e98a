"""Answers to the exercises of notebook 02, right and wrong."""

import torch
import torch.nn.functional as F


def total_loss(model, inputs, labels):
    return F.cross_entropy(
        model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def counted(group):
    return sum(int((labels != -100).sum()) for _, labels in group)


def stepped(model, optimizer, micro_batches, divisor):
    """A step whose losses are each divided by what `divisor` gives of a micro-batch."""
    mean = 0.0
    for inputs, labels in micro_batches:
        loss = total_loss(model, inputs, labels) / divisor([(inputs, labels)])
        loss.backward()
        mean += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return mean


def train_group(model, optimizer, micro_batches):
    group = list(micro_batches)
    tokens = counted(group)
    return stepped(model, optimizer, group, lambda one: tokens)


def mean_of_means(model, optimizer, micro_batches):
    group = list(micro_batches)
    return stepped(model, optimizer, group, lambda one: max(1, counted(one)) * len(group))


def reads_a_generator_twice(model, optimizer, micro_batches):
    tokens = counted(micro_batches)
    return stepped(model, optimizer, micro_batches, lambda one: tokens)


def all_at_once(model, optimizer, micro_batches):
    inputs, labels = (torch.cat(parts) for parts in zip(*micro_batches))
    return train_group(model, optimizer, [(inputs, labels)])


def one_backward_for_all(model, optimizer, micro_batches):
    group = list(micro_batches)
    loss = sum(total_loss(model, *pair) for pair in group) / counted(group)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def steps_every_time(model, optimizer, micro_batches):
    return sum(train_group(model, optimizer, [pair]) for pair in micro_batches)


def never_clears(model, optimizer, micro_batches):
    class Keeps:
        step = optimizer.step

        def zero_grad(self):
            pass

    return train_group(model, Keeps(), micro_batches)


def says_nothing(model, optimizer, micro_batches):
    train_group(model, optimizer, micro_batches)


def momenta(m, k):
    return [m / k / (1 - m * (k - j) / k) for j in range(1, k + 1)]


RIGHT = {"02.1": 1.75, "02.2": 4, "02.3": train_group, "02.4": momenta}
WRONG = {
    "02.1": [1.0, 0.75, 1.25, 7, 4, "1.75"],
    "02.2": [2, 8, 3, 4.5],
    "02.3": [
        mean_of_means, reads_a_generator_twice, all_at_once, one_backward_for_all,
        steps_every_time, never_clears, says_nothing, 3,
    ],
    "02.4": [
        lambda m, k: [1 - (1 - m) ** (1 / k)] * k, lambda m, k: [m / k] * k, lambda m, k: [m] * k,
        lambda m, k: momenta(m, k)[::-1], lambda m, k: m / k,
    ],
}  # fmt: skip
