"""The facts of a planned program, from the trace of its run: plain values that JSON holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tight_fit.gpus import CONTEXT, GPU, NCCL, WORKSPACE, cublas_workspace
from tight_fit.kernels.step_seconds import seconds
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.memory.allocator import MAX_STEPS
from tight_fit.memory.plan import fit_on_gpu
from tight_fit.plans.own_step import Replay, least
from tight_fit.script.evaluation import first_call
from tight_fit.script.program import ProgramRun
from tight_fit.script.steps import FIRST_KEPT, LASTING, Watch
from tight_fit.trace.storage_trace import BORN, CATEGORIES, DIES, PARAMETERS, PHASES, StorageTrace

LARGEST = 12  # lines of tensors that are listed
POINTS = 600  # of the timeline that is drawn
Facts = dict[str, Any]


def facts_of(state: ProgramRun, watch: Watch) -> Facts:
    """Everything that a report says of a run."""
    trace, ends = state.tracker.counted(watch.ends)
    if not trace.events or (state.wanted.gpu is not None and not state.places.named):
        return {"nothing_on_gpu": True}
    alive, categories = _alive(trace)
    peak_at = int(alive.argmax())
    evaluation = _evaluation(state, watch, alive)
    regular = ends[watch.regular - 1] if watch.regular else ends[-1]
    facts: Facts = {
        "script": state.wanted.script,
        "change": state.wanted.change,
        "peak": int(alive[peak_at]),
        "peak_phase": _phase(trace, evaluation, peak_at),
        "evaluation": evaluation,
        "at_peak": _at_peak(trace, categories, peak_at),
        "largest": _largest(state, trace, categories, peak_at),
        "steps": _steps(alive, ends),
        "regular": watch.regular or len(ends),
        "peak_seen": int(alive[:regular].max()),
        "parameters": _parameters(state, categories),
        "optimizers": watch.kinds,
        "ways": watch.ways,
        "without_gradient": watch.without_gradient,
        "attention": state.found.attention,
        "growth": _growth(state, watch),
        "rank": _rank(state, watch),
        "timeline": _timeline(trace, categories, ends, peak_at),
        "asked": dict(state.known.asked),
        "spread": dict(state.known.spread),
        "generates": state.evaluation.generates,
        "notes": state.notes.sentences,
        "found": {
            **{name: getattr(state.found, name) for name in ("trainer", "parses", "settings")},
            **{name: getattr(state.found, name) for name in ("autocast", "checkpoints")},
            "optimizer": state.found.optimizer,
            "took": sorted(
                state.found.took | ({"accumulation"} if state.loaders.divided else set())
            ),
        },
        **_batches(state),
    }
    if state.wanted.gpu is not None:
        fraction, line = state.gpu.fraction
        ranks = state.wanted.rank.ranks if state.wanted.rank else 1
        most = max(facts["peak"], evaluation["peak"])
        facts |= _on_gpu(state.wanted.gpu, trace, most, facts["peak"], fraction, ranks)
        facts["fraction"] = {"of": fraction, "line": line}
        facts |= _seconds(watch.operations, state.wanted.gpu, "")
        if watch.longest_operations is not None:
            facts |= _seconds(watch.longest_operations, state.wanted.gpu, "longest_")
    return facts


def _alive(trace: StorageTrace) -> tuple[np.ndarray, dict[int, int]]:
    """(bytes alive after each event, {storage: its category}).

    What became a parameter, a gradient or an optimizer state has been one since it was made.
    """
    sizes = np.array(trace.bytes, dtype=np.int64)
    events = np.array([event[:3] for event in trace.events], dtype=np.int64)
    signs = np.where(events[:, 0] == BORN, 1, np.where(events[:, 0] == DIES, -1, 0))
    categories: dict[int, int] = {}
    for _, storage, category in events.tolist():
        if categories.get(storage) not in LASTING or category in LASTING:
            categories[storage] = category
    return np.cumsum(signs * sizes[events[:, 1]]), categories


def _held_at(trace: StorageTrace, event: int) -> list[int]:
    """The storages alive after an event."""
    held: dict[int, None] = {}
    for kind, storage, _, _ in trace.events[: event + 1]:
        if kind == BORN:
            held[storage] = None
        elif kind == DIES:
            held.pop(storage, None)
    return list(held)


def _at_peak(trace: StorageTrace, categories: dict[int, int], event: int) -> dict[str, int]:
    totals = dict.fromkeys(CATEGORIES, 0)
    for storage in _held_at(trace, event):
        totals[CATEGORIES[categories[storage]]] += trace.bytes[storage]
    return totals


def _largest(
    state: ProgramRun, trace: StorageTrace, categories: dict[int, int], event: int
) -> list[dict[str, Any]]:
    """The largest tensors at the peak; those that one line made in one shape are one row."""
    rows: dict[tuple, dict[str, Any]] = {}
    for storage in _held_at(trace, event):
        origin, shape, dtype = state.tracker.origins[storage]
        name = trace.made_by[storage]
        key = (origin.line, origin.deepest, origin.module, name, shape, dtype, categories[storage])
        row = rows.setdefault(
            key,
            {
                "bytes": 0,
                "count": 0,
                "line": origin.line,
                "deepest": origin.deepest,
                "module": origin.module,
                "operation": name,
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "category": CATEGORIES[categories[storage]],
            },
        )
        row["bytes"] += trace.bytes[storage]
        row["count"] += 1
    return sorted(rows.values(), key=lambda row: -row["bytes"])[:LARGEST]


def _steps(alive: np.ndarray, ends: list[int]) -> list[dict[str, int]]:
    """For each step the bytes alive when it began, and the most in it."""
    steps, begin = [], 0
    for end in ends:
        before = int(alive[begin - 1]) if begin else 0
        steps.append({"begin": before, "peak": int(max(before, *alive[begin:end], before))})
        begin = end
    return steps


def _parameters(state: ProgramRun, categories: dict[int, int]) -> int:
    """Elements of all parameters; of one in 4 bits those that are packed into it."""
    if state.wanted.rank is not None:
        return sum(state.tracker.whole.values())
    return sum(
        state.tracker.elements.get(storage, int(np.prod(shape)))
        for storage, (_, shape, _) in state.tracker.origins.items()
        if categories.get(storage) == PARAMETERS
    )


def _rank(state: ProgramRun, watch: Watch) -> dict[str, Any] | None:
    """Which rank was planned, and what it sends in its last regular step."""
    rank = state.wanted.rank
    if rank is None:
        return None
    ends = [0, *watch.ends[: watch.regular or None]]
    return {
        "number": rank.number,
        "ranks": rank.ranks,
        "sent": state.meter.between(*ends[-2:]),
        "unknown": sorted(state.meter.unknown),
    }


def _evaluation(state: ProgramRun, watch: Watch, alive: np.ndarray) -> dict[str, Any]:
    """What is known of the program's evaluation.

    line     at which it begins, "" where none was seen
    calls    of the model
    of       batches that there are, None where that is not known
    extra    bytes by which the batches that were not followed raise its peak
    windows  first event of each, and the one after its last
    begin    bytes that were alive when the last planned step had ended
    peak     most bytes in it; training the most outside of it
    stopped  why it was not followed to its end
    told     the line that evaluates, by the program's text
    """
    seen = state.evaluation
    seen.close()
    if watch.over and seen.windows and seen.calls > watch.seen_before:
        seen.windows[-1][1] = len(state.tracker.storage_trace.events)
    _, flat = state.tracker.counted([mark for window in seen.windows for mark in window])
    windows = list(zip(flat[::2], flat[1::2]))
    inside = np.zeros(len(alive), dtype=bool)
    for begin, end in windows:
        inside[begin:end] = True
    of, extra = _left_out(state, alive)
    told = None if seen.calls or state.wanted.cell else first_call(state.wanted.script)
    return {
        "line": seen.line,
        "calls": seen.calls,
        "begin": int(alive[state.tracker.counted(watch.ends)[1][-1] - 1]),
        "of": of,
        "extra": extra,
        "windows": windows,
        "peak": int(alive[inside].max(initial=0)) + extra,
        "training": int(alive[~inside].max(initial=0)),
        "stopped": seen.stopped,
        "told": f"{Path(state.wanted.script).name}:{told}" if told else "",
    }


def _left_out(state: ProgramRun, alive: np.ndarray) -> tuple[int | None, int]:
    """(batches of the evaluation, bytes that those not followed add, as the last ones did)."""
    seen = state.evaluation
    try:
        count = len(state.loaders.evaluated)  # type: ignore[arg-type]
    except TypeError:
        return None, 0
    _, marks = state.tracker.counted(seen.marks)
    half = len(marks) // 2
    if not seen.stopped or half < 2 or len(marks) >= count:
        return count, 0
    peaks = [int(alive[begin:end].max(initial=0)) for begin, end in pairwise(marks)]
    each = (peaks[-1] - peaks[half - 1]) / (len(peaks) - half)
    return count, max(0, int(each * (count - len(peaks))))


def _phase(trace: StorageTrace, evaluation: dict[str, Any], event: int) -> str:
    if any(begin <= event < end for begin, end in evaluation["windows"]):
        return "evaluation"
    return PHASES[trace.events[event][3]]


def _growth(state: ProgramRun, watch: Watch) -> dict[str, Any] | None:
    """The bytes by which memory grows in a step, and the lines that made them; None without."""
    kept = watch.kept()
    if len(kept) < MAX_STEPS or not all(kept[FIRST_KEPT:-1]):
        return None
    least = min(kept[FIRST_KEPT:-1], key=lambda storages: sum(storages.values()))
    origins = [state.tracker.origins[storage][0] for storage in least]
    lines = dict.fromkeys(origin.line or origin.deepest for origin in origins)
    return {"bytes": sum(least.values()), "lines": list(lines)}


def _timeline(
    trace: StorageTrace, categories: dict[int, int], ends: list[int], peak_at: int
) -> dict[str, Any]:
    """Bytes by category over the step that holds the peak, thinned."""
    edges = [0, *ends, len(trace.events)]
    number = next(n for n, end in enumerate(edges[1:]) if peak_at < end or end == edges[-1])
    begin, end = edges[number], edges[number + 1]
    changes = np.zeros((len(trace.events), len(CATEGORIES)), dtype=np.int64)
    for event, (kind, storage, _, _) in enumerate(trace.events):
        if kind in (BORN, DIES):
            sign = 1 if kind == BORN else -1
            changes[event, categories[storage]] = sign * trace.bytes[storage]
    rows = changes.cumsum(axis=0)[begin:end]
    even = np.arange(0, len(rows), max(1, len(rows) // POINTS))
    points = np.unique([*even, peak_at - begin, len(rows) - 1])
    phases = [trace.events[begin + point][3] for point in points]
    return {"bytes": rows[points].tolist(), "phases": phases, "step": number}


def _batches(state: ProgramRun) -> Facts:
    feeds = state.loaders
    loader = feeds.drawn
    longest = feeds.longest
    return {
        "loader": feeds.lines.get(id(loader), "") if loader is not None else "",
        "batch_size": getattr(loader, "batch_size", None) if loader is not None else None,
        "batch_seen": list(feeds.most_seen() or ()),
        "batch_longest": list(longest.shape) if longest and longest.batch is not None else None,
        "longest_given": feeds.given > 0,
        "examples": longest.of if longest else None,
        "examples_read": longest.read if longest else None,
    }


def _on_gpu(
    gpu: GPU, trace: StorageTrace, most: int, peak: int, fraction: float, ranks: int
) -> Facts:
    """What PyTorch's allocator would report of the whole run, and whether the GPU holds it.

    most      bytes of tensors that are planned; peak those in the trace
    fraction  of the GPU's memory that PyTorch may have; the CUDA context is not of it
    """
    gpu = gpu._replace(memory=min(gpu.memory, int(fraction * gpu.memory) + CONTEXT))
    end = len(trace.events)
    peaks = Replay(cublas_workspace(gpu) // 2).run(trace, end)
    fit = fit_on_gpu(gpu, most, least(trace) - peak - 2 * WORKSPACE)
    if ranks > 1:
        fit = replace(fit, terms=fit.terms | {"NCCL buffers": NCCL})
    return {
        "card": gpu.name,
        "card_memory": gpu.memory,
        "allocated": peaks.allocated,
        "reserved": peaks.reserved,
        "terms": fit.terms,
        "need": fit.need,
        "fits": bool(fit),
    }


def _seconds(operations: TracedOps | None, gpu: GPU, prefix: str) -> Facts:
    """How long the step takes, None with the reason where that is not known."""
    try:
        if operations is None:
            raise ValueError("no step was traced.")
        operations.tf32 = torch.get_float32_matmul_precision() != "highest"
        taken = seconds(operations, gpu)
    except (ValueError, KeyError) as error:
        return {f"{prefix}seconds": None, "no_time": str(error)}
    return {
        f"{prefix}seconds": taken.total,
        f"{prefix}seconds_low": taken.low,
        f"{prefix}seconds_high": taken.high,
    }
