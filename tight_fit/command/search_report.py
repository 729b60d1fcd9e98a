"""What the command says of a search of layouts: one paragraph, a table, and what was left out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from tight_fit.command.report import option, three_figures, weights_in_words
from tight_fit.layouts.facts import Facts
from tight_fit.models.step import ModelStep
from tight_fit.search.layouts import PlannedTrial, Searched
from tight_fit.search.space import TIE, Trial
from tight_fit.units import number, several, size, span

AXES = {
    "data": "data messages",
    "tensor": "tensor messages",
    "pipeline": "pipeline messages",
    "replicate": "messages between replicas",
    "context": "context messages",
    "expert": "expert messages",
    "expert_data": "messages between ranks with the same experts",
    "bubble": "waits of stages for one another",
}
UNMEASURED = (
    "With expert ranks routing is taken to be balanced, and the time of their all-to-alls has not "
    "been compared with a measured one."
)
MOST_ROWS = 8  # of the table; --json has all


def report_of(found: Searched, model: str, typed: Mapping[str, Any]) -> Facts:
    """The answer as plain values.

    model  as it is typed
    typed  {option or field: value} of what was said beside layout, recomputation and micro-batches,
           from which the commands are made
    "slower" and "too_large" are {trial: seconds} and {layout: bytes}, both at the least.
    """
    best, second = found.best, found.runner_up
    facts: Facts = {
        "model": model,
        "cluster": str(found.cluster),
        "answer": answer(found),
        "winner": _with_command(best, model, typed),
        "runner_up": _with_command(second, model, typed),
        "ranked": [_row(one) for one in found.ranked],
        "slower": {str(trial): seconds for trial, seconds in found.slower.items()},
        "too_large": _missing(found),
        "left_out": found.left_out,
        "not_looked_at": [str(trial) for trial in found.bounded],
        "plans": len(found.planned),
    }
    return facts


def answer(found: Searched) -> str:
    """The paragraph: the best, what it takes and what limits it, the runner-up and why it lost."""
    job, best = found.job, found.best
    what = several(job.batch_size, "example") + (f" of {job.tokens} tokens" if job.tokens else "")
    if best is None:
        return _nothing_fits(found, what)
    facts = best.facts
    rate = ""
    if facts["tokens_per_second"]:
        rate = (
            f", {three_figures(facts['tokens_per_second'])} tokens per second "
            f"({three_figures(facts['tokens_per_second_per_gpu'])} per GPU)"
        )
    sentences = [
        f"Take {best.trial}: each GPU needs {size(facts['need'])} of {size(facts['card_memory'])}, "
        f"and a step of {what} takes {_takes(best.seconds)}{rate}.",
        _limit(best),
    ]
    second = found.runner_up
    if second is None:
        sentences.append("Nothing else that fits was found.")
    else:
        sentences.append(
            f"The runner-up is {second.trial} ({_takes(second.seconds)}, "
            f"{size(second.facts['need'])}): {_why_it_lost(found, best, second)}."
        )
    if any(one is not None and one.trial.layout.expert > 1 for one in (best, second)):
        sentences.append(UNMEASURED)
    return " ".join(sentences)


def _nothing_fits(found: Searched, what: str) -> str:
    missing = _missing(found)
    layout = min(missing, key=lambda name: missing[name])
    return (
        f"Nothing fits: for a step of {what} even {layout} needs at least "
        f"{size(missing[layout])} more than the {size(found.cluster.gpu.memory)} of a GPU, with "
        "every recomputation and number of micro-batches that was tried. "
        f"Take {_what_saves(found.job)}."
    )


def _what_saves(job: ModelStep) -> str:
    """What makes a step smaller that no search tries."""
    ways = ["larger GPUs" if job.base == "nf4" else "more or larger GPUs", "shorter examples"]
    if job.lora_rank is not None and job.base != "nf4":
        ways.append("a base in 4 bits (--base nf4)")
    elif job.weights == "fp32":
        ways.append("weights of 16 bits (--weights bf16)")
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


def _limit(best: PlannedTrial) -> str:
    facts = best.facts
    work = f"{facts['seconds_of_work'] / best.seconds:.0%} of the step is work"
    waits = {axis: seconds for axis, seconds in facts["seconds_waiting"].items() if seconds > 0}
    if facts["limit"] != "compute":
        return f"{AXES[facts['limit']].capitalize()} limit it: {work}."
    if not waits:
        return f"Computing limits it: {work}."
    axis = max(waits, key=lambda name: waits[name])
    return f"Computing limits it: {work}, and it waits {span(waits[axis])} for {AXES[axis]}."


def _takes(seconds: float) -> str:
    """Seconds to tell layouts apart by: 2.39 s."""
    return f"{seconds:.2f} s" if 1 <= seconds < 60 else span(seconds)


def _why_it_lost(found: Searched, best: PlannedTrial, second: PlannedTrial) -> str:
    slower = second.seconds / best.seconds - 1
    if second.seconds > (1 + TIE) * found.fastest:
        waits = _waiting(second) - _waiting(best)
        work = second.facts["seconds_of_work"] - best.facts["seconds_of_work"]
        more = f"{span(work)} more work" if work > waits else f"{span(waits)} more waiting"
        return f"it is {slower:.0%} slower, with {more}"
    how = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
    return (
        f"it is {how}, within the {TIE:.0%} that a plan cannot tell apart, and it "
        f"{_less_simple(best.trial, second.trial)}"
    )


def _waiting(one: PlannedTrial) -> float:
    """Seconds that a step waits for messages, and in a pipeline for other stages."""
    return sum(one.facts["seconds_waiting"].values()) + one.facts["seconds_of_bubble"]


def _less_simple(best: Trial, second: Trial) -> str:
    if second.axes > best.axes:
        more = second.axes - best.axes
        if more == 1 and second.layout.expert > 1:
            return "divides the experts over ranks as well"
        return f"has {more} {'axis' if more == 1 else 'axes'} of ranks more"
    if second.recompute != best.recompute:
        return f"recomputes more ({second.recompute} in place of {best.recompute})"
    if second.accumulation != best.accumulation:
        return f"takes {second.accumulation} micro-batches in place of {best.accumulation}"
    if second.layout.strategy != best.layout.strategy:
        return "shards more of the model than is needed"
    return "is no simpler"


def _missing(found: Searched) -> dict[str, float]:
    """{layout: bytes that it needs beyond the GPU's memory}, of layouts none of whose trials fit
    and none of which was left aside as slower."""
    fit = {one.trial.layout for one in found.ranked} | {trial.layout for trial in found.slower}
    over = [(one.trial, float(one.over)) for one in found.planned if not one.fits]
    over += found.too_large.items()
    missing: dict[str, float] = {}
    for trial, count in over:
        if trial.layout not in fit:
            name = str(Trial(trial.layout))
            missing[name] = min(count, missing.get(name, count))
    return missing


def _row(one: PlannedTrial) -> Facts:
    return {
        "layout": str(one.trial.layout),
        "recompute": one.trial.recompute,
        "accumulation": one.trial.accumulation,
        "need": one.facts["need"],
        "seconds": one.seconds,
        "tokens_per_second": one.facts["tokens_per_second"],
        "limit": one.facts["limit"],
    }


def _with_command(one: PlannedTrial | None, model: str, typed: Mapping[str, Any]) -> Facts | None:
    if one is None:
        return None
    return one.facts | {"command": command_of(one.trial, model, typed)}


def command_of(trial: Trial, model: str, typed: Mapping[str, Any]) -> str:
    """The command that plans a trial by itself."""
    options = dict(typed)
    if trial.layout.ranks == 1:
        options.pop("machines", None)
    options["layout"] = trial.layout
    if trial.accumulation > 1:
        options["accumulation"] = trial.accumulation
    if trial.recompute != "none":
        options["recompute"] = trial.recompute
    words = ["tight-fit", shlex.quote(model)]
    for name, value in options.items():
        words.append(option(name, value))
    return " ".join(words)


def lines_of(facts: Facts, found: Searched) -> list[str]:
    """The text of the answer."""
    job = found.job
    lines = [
        f"{facts['model']}: {weights_in_words(vars(job))}, computed in {job.precision}, "
        f"{job.optimizer}, on {facts['cluster']}",
        "",
        facts["answer"],
    ]
    if facts["winner"]:
        lines += ["", facts["winner"]["command"], "", *_table(found)]
    lines += _slower(found)
    if facts["too_large"]:
        lines += ["", "Does not fit, and what is missing per GPU at the least"]
        lines += [f"  {name:30} {size(over):>11}" for name, over in facts["too_large"].items()]
    if facts["left_out"]:
        lines += ["", "Left out"]
        lines += [f"  {name}: {why}" for name, why in facts["left_out"].items()]
    if found.bounded:
        count = number(len(found.bounded))
        lines += ["", f"{count} more layouts were not looked at, to bound the time of the search."]
    return lines


def _table(found: Searched) -> list[str]:
    lines = [f"{'What fits, the best first':59} {'per GPU':>11} {'a step':>10} {'limit':>8}"]
    lines += [
        f"  {one.trial!s:57} {size(one.facts['need']):>11} {_takes(one.seconds):>10} "
        f"{one.facts['limit']:>8}"
        for one in found.ranked[:MOST_ROWS]
    ]
    more = len(found.ranked) - MOST_ROWS
    return [*lines, f"  and {more} more (--json)"] if more > 0 else lines


def _slower(found: Searched) -> list[str]:
    """Of each layout that was not planned to the end, the least time it may take."""
    there = {one.trial.layout for one in found.ranked}
    least: dict[Trial, float] = {}
    for trial, seconds in sorted(found.slower.items(), key=lambda pair: pair[1]):
        if trial.layout not in there:
            there.add(trial.layout)
            least[trial] = seconds
    if not least:
        return []
    lines = ["", "Not planned, as it cannot win: what a step takes at the least"]
    return lines + [
        f"  {trial!s:57} {'':11} {_takes(seconds):>10}" for trial, seconds in least.items()
    ]
