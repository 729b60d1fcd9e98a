"""Answers to the exercises of notebook 17, right and wrong."""

import functools
import math


def direction(g, m, v, t, beta1, beta2, eps, corrected=True):
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    if not corrected:
        return m / (v.sqrt() + eps)
    return m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)


def right(w, g, m, v, t, lr, decay, beta1=0.9, beta2=0.999, eps=1e-6):
    u = direction(g, m, v, t, beta1, beta2, eps) + decay * w
    length, step = w.norm().item(), u.norm().item()
    ratio = length / step if length > 0 and step > 0 else 1.0
    w.sub_(lr * ratio * u)


def as_given(w, g, m, v, t, lr, decay, beta1=0.9, beta2=0.999, eps=1e-6):
    r = direction(g, m, v, t, beta1, beta2, eps, corrected=False)
    w.sub_(lr * w.norm() / r.norm() * (r + decay * w))


def norm_without_decay(w, g, m, v, t, lr, decay, beta1=0.9, beta2=0.999, eps=1e-6):
    r = direction(g, m, v, t, beta1, beta2, eps)
    w.sub_(lr * (w.norm() / r.norm() if w.norm() > 0 and r.norm() > 0 else 1.0) * (r + decay * w))


def zeros_stay(w, g, m, v, t, lr, decay, beta1=0.9, beta2=0.999, eps=1e-6):
    u = direction(g, m, v, t, beta1, beta2, eps) + decay * w
    w.sub_(lr * w.norm() / u.norm().clamp(min=1e-30) * u)


def divides_by_zero(w, g, m, v, t, lr, decay, beta1=0.9, beta2=0.999, eps=1e-6):
    u = direction(g, m, v, t, beta1, beta2, eps) + decay * w
    w.sub_(lr * (w.norm() / u.norm() if w.norm() > 0 else 1.0) * u)


def lamb(weight, m, v, lr, decay, most=10.0, inside=True, zeros=1.0):
    r = m / (v.sqrt() + 1e-8)
    u = r + decay * weight
    length, moved = min(weight.norm().item(), most), (u if inside else r).norm().item()
    return weight - lr * (length / moved if length and moved else zeros) * u


def critical(b, squares, B, whole):
    trace = (squares - whole) / (1 / b - 1 / B)
    length = whole - trace / B
    return trace / length if length > 0 else math.inf


def biased(b, squares, B, whole):
    return (squares - whole) / (1 / b - 1 / B) / whole


def no_limit(b, squares, B, whole):
    trace = (squares - whole) / (1 / b - 1 / B)
    return trace / (whole - trace / B) if whole != trace / B else math.inf


def swapped(b, squares, B, whole):
    trace = (squares - whole) / (1 / b - 1 / B)
    return (whole - trace / B) / trace


RIGHT = {
    "17.1": (33, 0.001 * math.sqrt(32), 0.032),
    "17.2": lamb,
    "17.4": right,
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
        as_given, norm_without_decay, zeros_stay, divides_by_zero, 3,
    ],
    "17.3": [
        biased, no_limit, swapped, lambda b, squares, B, whole: b * squares / whole,
        40,
    ],
}  # fmt: skip
