"""Answers to the exercises of notebook 12, right and wrong."""


def place(steps, accumulation, batches):
    per_epoch = -(-batches // accumulation)
    return steps // per_epoch, steps % per_epoch * accumulation


def only_full_groups(steps, accumulation, batches):
    return divmod(steps * accumulation, batches)


def rest_in_steps(steps, accumulation, batches):
    return divmod(steps, -(-batches // accumulation))


def handed(loss_sum, rows, steps, ranks):
    return loss_sum * steps * ranks / rows


def moved(zero, part):
    return zero.get(part, {}).get("device", "none") != "none"


def by_names_alone(config, ranks):
    """Counts a part as moved because it is named, also to the device "none"."""
    zero = config["zero_optimization"]
    named = {part: {"device": "cpu"} for part in zero if part.startswith("offload_")}
    return on_the_gpu({"zero_optimization": zero | named}, ranks)


def on_the_gpu(config, ranks):
    zero = config["zero_optimization"]
    stage, away = zero["stage"], moved(zero, "offload_optimizer")
    weights = 0 if moved(zero, "offload_param") else 4 / (ranks if stage == 3 else 1)
    return (
        weights,
        0 if away else 4 / (ranks if stage >= 2 else 1),
        0 if away else 8 / (ranks if stage >= 1 else 1),
    )


def diagnosis(kind, counted, started):
    if kind != "DEEPSPEED":
        return "dropped"
    return "alone" if counted < started else "fine"


def blind_to_offload(config, ranks):
    return on_the_gpu({"zero_optimization": {"stage": config["zero_optimization"]["stage"]}}, ranks)


def all_away(config, ranks):
    away = "offload_optimizer" in config["zero_optimization"]
    return (0, 0, 0) if away else blind_to_offload(config, ranks)


RIGHT = {"12.1": place, "12.2": handed, "12.3": on_the_gpu, "12.4": diagnosis}
WRONG = {
    "12.1": [
        only_full_groups, rest_in_steps,
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
        blind_to_offload, all_away, by_names_alone, lambda config, ranks: (4, 4, 8),
        (4, 4, 8),
    ],
    "12.4": [
        lambda kind, counted, started: "fine",
        lambda kind, counted, started: "fine" if kind == "DEEPSPEED" else "dropped",
        lambda kind, counted, started: "alone" if counted == 1 else "fine",
        lambda kind, counted, started: "alone" if counted != started else "dropped",
    ],
}  # fmt: skip
