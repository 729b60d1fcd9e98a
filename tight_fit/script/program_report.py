"""The text of a program's plan, from its facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tight_fit.script.remedies import Remedy
from tight_fit.units import a_gpu, duration, number, size, size_line

Facts = dict[str, Any]
LINES = 8  # of tensors that are printed
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def lines(facts: Facts, remedies: list[Remedy] | None) -> list[str]:
    """The whole report. `remedies` None: they were not looked for."""
    text = [*verdict(facts), *advice(facts, remedies), ""]
    text.append(f"peak of the tensors, in the {facts['peak_phase']} phase: {size(facts['peak'])}")
    text += [size_line(name, count) for name, count in facts["at_peak"].items()]
    text += ["", "the largest tensors at that moment, and the lines that made them"]
    text += [_tensor(row) for row in facts["largest"][:LINES]]
    text += ["", f"on {a_gpu(facts['card'])}"]
    text += [size_line(term, count) for term, count in facts["terms"].items()]
    text += [size_line("needed", facts["need"]), size_line("the GPU has", facts["card_memory"])]
    text += ["", *_time(facts)]
    text.append(
        f"With room to spare PyTorch would report {size(facts['allocated'])} allocated, "
        f"{size(facts['reserved'])} reserved."
    )
    return text + [f"Note: {note}" for note in notes(facts)]


def verdict(facts: Facts) -> list[str]:
    """What was planned, and whether it fits."""
    name = Path(facts["script"]).name
    ways = facts["ways"]
    kinds = " and ".join(
        f"{kind} ({ways[kind]})" if ways.get(kind) else kind for kind in facts["optimizers"]
    )
    words = (
        f"{number(facts['parameters'])} parameters, {kinds}, {_precision(facts)}{_attention(facts)}"
    )
    over = facts["need"] - facts["card_memory"]
    fits = "YES, it fits" if facts["fits"] else "NO, it does not fit"
    room = "to spare" if facts["fits"] else "too much"
    return [
        f"Planned: {facts['regular']} steps of {name} as it is; {words}.",
        *_batches(facts),
        f"{fits} on {a_gpu(facts['card'])}: it needs {size(facts['need'])} of "
        f"{size(facts['card_memory'])}, {size(abs(over))} {room}.",
        *_limited(facts),
        *_grows(facts),
        *_evaluation(facts),
        *_rank(facts),
    ]


def _limited(facts: Facts) -> list[str]:
    limit = facts["fraction"]
    if limit["of"] >= 1:
        return []
    return [f"{limit['line']} lets PyTorch have {limit['of']:.0%} of the GPU: that is counted."]


def _rank(facts: Facts) -> list[str]:
    rank = facts["rank"]
    if rank is None:
        return []
    total = sum(count for _, count in rank["sent"].values())
    kinds = ", ".join(
        f"{times} × {kind} {size(count)}" for kind, (times, count) in rank["sent"].items()
    )
    text = (
        f"Planned is rank {rank['number']} of {rank['ranks']}, which sends {size(total)} in a step"
    )
    text += f" ({kinds})" if kinds else ""
    if rank["unknown"]:
        text += f", and {', '.join(rank['unknown'])}, which are not counted"
    return [f"{text}. What is sent takes time beside that of the step below."]


def _evaluation(facts: Facts) -> list[str]:
    evaluation = facts["evaluation"]
    if not evaluation["calls"]:
        if evaluation["told"] and facts["fits"]:
            why = f": {evaluation['stopped']}" if evaluation["stopped"] else ""
            return [f"Its evaluation ({evaluation['told']}) is not planned{why}."]
        return []
    text = (
        f"Its evaluation, from {evaluation['line'] or 'a library'} on, takes "
        f"{size(evaluation['peak'])} of tensors, and its training {size(evaluation['training'])}"
    )
    if evaluation["stopped"]:
        among = f" of {evaluation['of']:,}" if evaluation["of"] else ""
        text += (
            f"; of it {evaluation['calls']:,}{among} batches were followed, and the others counted "
            f"like them: {evaluation['stopped']}"
        )
    return [f"{text}."]


def _grows(facts: Facts) -> list[str]:
    growth = facts["growth"]
    if not growth:
        return []
    text = (
        f"Its memory grows: each step keeps {size(growth['bytes'])} more, made at "
        f"{', '.join(growth['lines'][:3])}"
    )
    room = facts["card_memory"] - facts["need"]
    if room < 0:
        return [f"{text}."]
    steps = facts["regular"] + room // growth["bytes"]
    return [f"{text}, so about {number(steps)} steps fit, and no more."]


def _attention(facts: Facts) -> str:
    ways = [
        f"{'fused' if fused else 'written-out'} attention in {SHORT.get(dtype, dtype)}"
        for dtype, fused in facts["attention"].items()
    ]
    return "".join(f", {way}" for way in ways)


def _precision(facts: Facts) -> str:
    words = facts["found"]["autocast"].removeprefix("torch.")
    text = f"{SHORT.get(words, words)} autocast" if words else "no autocast"
    return f"{text}, gradient checkpointing" if facts["found"]["checkpoints"] else text


def _batches(facts: Facts) -> list[str]:
    seen, longest = facts["batch_seen"], facts["batch_longest"]
    if not seen:
        return ["Its batches come from no DataLoader: those that it made are planned."]
    text = (
        f"Batches from {facts['loader'] or 'its data loader'}: the longest seen is {_shape(seen)}"
    )
    if facts["longest_given"] and longest == seen:
        return [f"{text}, and no longer one is possible."]
    if facts["longest_given"] and longest:
        read = facts["examples_read"]
        among = "" if read == facts["examples"] else f"the first {read:,} of "
        return [
            f"{text} ({size(facts['peak_seen'])} of tensors), the longest possible "
            f"{_shape(longest)} ({size(facts['peak'])}), from {among}{facts['examples']:,} "
            "examples: that one is planned."
        ]
    if facts["examples"]:
        return [f"{text}, and all examples that were looked at have the same size."]
    return [f"{text}; whether there are longer ones is not known."]


def advice(facts: Facts, remedies: list[Remedy] | None) -> list[str]:
    """The smallest changes that fit, in the words of this program."""
    if facts["fits"] or remedies is None:
        return []
    fitting = [remedy for remedy in remedies if remedy.fits]
    if not fitting:
        return [
            "No change that was tried makes it fit: take a smaller model, shorter examples or a "
            "larger GPU.",
            *(f"  {remedy.words}: {size(remedy.need)}" for remedy in remedies),
        ]
    together = all(len(remedy.change) > 1 for remedy in fitting)
    first = "no change alone, but together" if together else "each change alone"
    return [
        f"What would fit, {first}:",
        *(f"  {remedy.words} ({size(remedy.need)})" for remedy in fitting),
    ]


def notes(facts: Facts) -> list[str]:
    """What to know of the plan."""
    text = list(facts["notes"])
    for dtype, fused in facts["attention"].items():
        if not fused:
            text.append(
                f"{a_gpu(facts['card'])} has no fused kernel for this attention in "
                f"{SHORT.get(dtype, dtype)}: its operations run one by one, and keep their results."
            )
    none, count = facts["without_gradient"]
    if none:
        text.append(
            f"{none} of the {count} tensors that the optimizer was given got no gradient: they are "
            "not trained, and hold no optimizer states."
        )
    if facts["asked"]:
        lines_ = [line or "a library" for line in facts["asked"]]
        listed = ", ".join(lines_[:4]) + (", ..." if len(lines_) > 4 else "")
        text.append(
            "values that follow from the weights are not known; they were asked for at "
            f"{listed}, and each was answered with 1."
        )
    if facts["generates"]:
        text.append(
            f"what the model generates at {facts['generates']} is as long as it may become, and "
            "its words are made up."
        )
    if facts["spread"]:
        listed = ", ".join(line or "a library" for line in list(facts["spread"])[:4])
        text.append(
            "which tokens a router sends to which expert follows from the weights: each expert was "
            f"taken to get as many as any other, at {listed}."
        )
    return text


def _tensor(row: dict[str, Any]) -> str:
    shape = _shape(row["shape"]) if row["shape"] else "a number"
    kind = SHORT.get(row["dtype"], row["dtype"])
    times = f"{row['count']} × " if row["count"] > 1 else ""
    where = row["line"] or row["deepest"] or "a library"
    if row["deepest"] and row["deepest"] != row["line"]:
        where += f" ({row['deepest']})"
    inside = f" in {row['module']}" if row["module"] else ""
    made = "" if row["category"] == "parameters" else f", {row['operation']}{inside}"
    return f"  {size(row['bytes']):>12}  {where}: {row['category']}, {times}{shape} {kind}{made}"


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape))


def _time(facts: Facts) -> list[str]:
    if facts.get("seconds") is None:
        return [f"The time of a step is not planned: {facts.get('no_time', 'it is not known.')}"]
    low, high = duration(facts["seconds_low"]), duration(facts["seconds_high"])
    text = f"A step takes {duration(facts['seconds'])} ({low} to {high})"
    if facts.get("longest_seconds"):
        text += f", with the longest batch {duration(facts['longest_seconds'])}"
    return [f"{text}."]
