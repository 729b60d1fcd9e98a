"""Answers to the exercises of notebook 17, right and wrong."""

import functools
import math

from tests.exercises import mistakes


def step_in_place(w, g, m, v, t, lr, decay, beta1=0.9, beta2=0.999, eps=1e-6, wrong=""):
    """LAMB with corrected moments; `wrong` is the mistake that it makes."""
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    correct = (1, 1) if wrong == "as given" else (1 - beta1**t, 1 - beta2**t)
    r = m / correct[0] / ((v / correct[1]).sqrt() + eps)
    u = r + decay * w
    length, moved = w.norm(), (r if wrong in ("as given", "norm without decay") else u).norm()
    if wrong == "zeros stay":
        ratio = length / moved.clamp(min=1e-30)
    elif length > 0 and (moved > 0 or wrong == "divides by zero"):
        ratio = length / moved
    else:
        ratio = 1.0
    w.sub_(lr * ratio * u)


def lamb(weight, m, v, lr, decay, most=10.0, inside=True, zeros=1.0):
    r = m / (v.sqrt() + 1e-8)
    u = r + decay * weight
    length, moved = min(weight.norm().item(), most), (u if inside else r).norm().item()
    return weight - lr * (length / moved if length and moved else zeros) * u


def critical(b, squares, B, whole, wrong=""):
    """`wrong` is the mistake that it makes."""
    trace = (squares - whole) / (1 / b - 1 / B)
    length = whole if wrong == "biased" else whole - trace / B
    if wrong == "swapped":
        return length / trace
    return trace / length if length > 0 or wrong == "no limit" and length else math.inf


RIGHT = {
    "17.1": (33, 0.001 * math.sqrt(32), 0.032),
    "17.2": lamb,
    "17.4": step_in_place,
    "17.3": critical,
}
WRONG = {
    "17.1": [
        (30, 0.00566, 0.032), (33, 0.032, 0.00566), (32, 0.00566, 0.032), (33, 0.0045, 0.032),
        (11, 0.00566, 0.032), 33, (33, 0.00566),
    ],
    "17.2": [
        functools.partial(lamb, most=math.inf), functools.partial(lamb, inside=False),
        functools.partial(lamb, zeros=0.0), lambda weight, m, v, lr, decay: weight - lr * m, 3,
    ],
    "17.4": [
        *mistakes(
            step_in_place, "as given", "norm without decay", "zeros stay", "divides by zero"
        ),
        3,
    ],
    "17.3": [
        *mistakes(critical, "biased", "no limit", "swapped"),
        lambda b, squares, B, whole: b * squares / whole, 40,
    ],
}  # fmt: skip
