"""Answers to the exercises of notebook 12, right and wrong."""

from tests.exercises import mistakes


def place(steps, accumulation, batches, wrong=""):
    """`wrong` is the mistake that it makes."""
    if wrong == "full groups only":
        return divmod(steps * accumulation, batches)
    epochs, rest = divmod(steps, -(-batches // accumulation))
    return epochs, rest if wrong == "the rest in steps" else rest * accumulation


def handed(loss_sum, rows, steps, ranks):
    return loss_sum * steps * ranks / rows


def on_the_gpu(config, ranks, wrong=""):
    """`wrong` is the mistake that it makes."""
    zero = config["zero_optimization"]
    named = [part for part in ("offload_param", "offload_optimizer") if part in zero]
    away = [part for part in named if zero[part].get("device", "none") != "none"]
    if wrong == "by names alone":  # also what is moved to the device "none"
        away = named
    if wrong == "blind to offload":
        away = []
    if wrong == "all away" and "offload_optimizer" in named:
        return 0, 0, 0
    sharded = [ranks if zero["stage"] >= stage else 1 for stage in (3, 2, 1)]
    kept = "offload_param" not in away, *["offload_optimizer" not in away] * 2
    return tuple(size * on / cut for size, on, cut in zip((4, 4, 8), kept, sharded))


def diagnosis(kind, counted, started):
    if kind != "DEEPSPEED":
        return "dropped"
    return "alone" if counted < started else "fine"


RIGHT = {"12.1": place, "12.2": handed, "12.3": on_the_gpu, "12.4": diagnosis}
WRONG = {
    "12.1": [
        *mistakes(place, "full groups only", "the rest in steps"),
        lambda steps, accumulation, batches: (0, steps * accumulation), (1, 4),
    ],
    "12.2": [
        lambda loss_sum, rows, steps, ranks: loss_sum / rows,
        lambda loss_sum, rows, steps, ranks: loss_sum / rows * steps,
        lambda loss_sum, rows, steps, ranks: loss_sum / rows * ranks,
        lambda loss_sum, rows, steps, ranks: loss_sum / steps / ranks,
        lambda loss_sum, rows, steps, ranks: loss_sum / rows / steps / ranks,
    ],
    "12.3": [
        *mistakes(on_the_gpu, "blind to offload", "all away", "by names alone"),
        lambda config, ranks: (4, 4, 8), (4, 4, 8),
    ],
    "12.4": [
        lambda kind, counted, started: "fine",
        lambda kind, counted, started: "fine" if kind == "DEEPSPEED" else "dropped",
        lambda kind, counted, started: "alone" if counted == 1 else "fine",
        lambda kind, counted, started: "alone" if counted != started else "dropped",
    ],
}  # fmt: skip
