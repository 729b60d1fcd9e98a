"""The trace of a step with another optimizer, from that of the same step with fused AdamW.

An optimizer decides what lies in memory before a step, and what happens after the last backward
pass; what is between them is the same with each of them. So its part, from one trace of a plain
step, stands for that of all steps that train the same parameters: in other precisions, with
checkpointing, at any batch size. Compiled layers are left out: their gradients are freed in another
order. Nothing here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tight_fit.kernels.op import Op
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.models.step import ModelStep
from tight_fit.plans.batch_line import Traced
from tight_fit.plans.living import Living
from tight_fit.trace.storage_trace import (
    BORN,
    DIES,
    GRADIENTS,
    PARAMETERS,
    PHASES,
    Event,
    StorageTrace,
    deaths_sorted,
)

ON_HOST = "optimizer"  # what offload says where an optimizer's states wait in the host's memory
OPTIMIZER = PHASES.index("optimizer")
PLAIN: dict[str, Any] = {
    "batch_size": 2,  # a single example takes other operations than several, and the same optimizer
    "checkpointing": False,
    "accumulation": 1,
    "attention": None,
    "flash": True,
    "loss": "full",
}


def with_adamw(step: ModelStep) -> ModelStep | None:
    """The step with fused AdamW, whose states are on the GPU; None where it is that already, or
    where an optimizer's part is no part by itself."""
    if step.optimizer_in_backward or step.float8 is not None:
        return None
    offload = None if step.offload == ON_HOST else step.offload
    if (step.optimizer, step.offload) == ("adamw", offload):
        return None
    return _replaced(step, optimizer="adamw", offload=offload)


def plain(step: ModelStep) -> ModelStep | None:
    """The step whose optimizer's part is that of a step: one that trains the same parameters.

    A loss that is scaled, as fp16 does it, is unscaled by the optimizer.
    """
    offload = step.offload if step.offload == ON_HOST else None
    precision = "fp16" if step.precision == "fp16" else step.weights
    return _replaced(step, **PLAIN, offload=offload, precision=precision)


def _replaced(step: ModelStep, **fields: Any) -> ModelStep | None:
    try:
        return replace(step, **fields)
    except ValueError:
        return None


def optimizer_part(traced: Traced, usual: Traced) -> dict[str, Any] | None:
    """What a trace has of its optimizer, as JSON holds it; None where it is no part by itself.

    traced  of a step in one micro-batch
    usual   the trace of the same step with fused AdamW
    """
    (trace, parameters), (other, same) = traced, usual
    if trace.operations is None or parameters != same or trace.reached != other.reached:
        return None
    more = {name: count for name, count in trace.flops.items() if name not in other.flops}
    if trace.flops != other.flops | more or _body(trace) != _body(other):
        return None
    living, end = Living(), _end(trace)
    states = living.follow(trace.events[: trace.begin])
    before = living.born
    living.follow(trace.events[trace.begin : end])
    usual_end = _end(other)
    usual_living = _living_at(other, usual_end)
    gradients = _of_parameters(other, usual_living, usual_end)
    places = {storage: place for place, storage in enumerate(usual_living.of.get(GRADIENTS, ()))}
    living.of[GRADIENTS] = [living.of[GRADIENTS][places[storage]] for storage in gradients]
    last, update = living.born, living.follow(trace.events[end:])
    numbers: dict[int, int] = {}
    order = [
        [numbers.setdefault(index, len(numbers)), phase]
        for index, phase in trace.operations.order[trace.operations.again[1] :]
    ]
    return {
        "states": states,
        "update": update,
        "bytes": trace.bytes[:before] + trace.bytes[last:],
        "made_by": trace.made_by[:before] + trace.made_by[last:],
        "gradients": [other.bytes[storage] for storage in gradients],
        "ops": [trace.operations.ops[index] for index in numbers],
        "order": order,
        "unknown": trace.operations.unknown,
        "flops": more,
        "reached": sorted(trace.reached),
    }


def with_optimizer(traced: Traced, part: Mapping[str, Any], accumulation: int = 1) -> Traced | None:
    """The trace of a step with the optimizer of a part, in place of fused AdamW that it was traced
    with; None where the part is of other parameters, or leaves something that was freed at the end
    of the step, as T5 with checkpointing has it."""
    (trace, parameters), operations = traced, traced[0].operations
    end, own = _end(trace), _born(trace.events[: trace.begin])
    count = sum(event[2] == PARAMETERS for event in trace.events[: trace.begin])
    there = _living_at(trace, end)
    of_parameters, last = _of_parameters(trace, there, end), there.born
    gradients = _of_sizes(part["gradients"], of_parameters, trace.bytes)
    if (
        operations is None
        or gradients is None
        or any(event[3] != OPTIMIZER for event in trace.events[end:])
        or sorted(trace.reached) != part["reached"]
        or trace.bytes[:count] != part["bytes"][:count]
    ):
        return None
    living = Living()
    states, before = living.events(part["states"]), living.born
    more = before - own  # states than fused AdamW has
    body = [
        (kind, storage if storage < count else storage + more, category, phase)
        for kind, storage, category, phase in trace.events[trace.begin : end]
    ]
    there.of[GRADIENTS] = gradients
    for category, storages in there.of.items():
        for storage in storages:
            if storage >= own:
                living.add(storage + more, category)
    living.born = last + more
    events = [*states, *body, *living.events(part["update"])]
    if {storage + more for storage in _left(trace.events, own, last)} != _left(
        events, before, last + more
    ):
        return None
    changed = StorageTrace(
        [*part["bytes"][:before], *trace.bytes[own:last], *part["bytes"][before:]],
        [*part["made_by"][:before], *trace.made_by[own:last], *part["made_by"][before:]],
        deaths_sorted(events),
        len(states),
        trace.reached,
        trace.flops
        | {name: n * accumulation // min(accumulation, 2) for name, n in part["flops"].items()},
        _operations(operations, part),
    )
    return changed, parameters


def _operations(body: TracedOps, part: Mapping[str, Any]) -> TracedOps:
    """The operations of a body, and then those of a part."""
    kernels = [tuple(op_of(op) for op in some) for some in part["ops"]]
    issued = [(body.ops[index], phase) for index, phase in body.order[: body.again[1]]]
    issued += [(kernels[index], phase) for index, phase in part["order"]]
    known: dict[tuple[Op, ...], int] = {}
    order = [(known.setdefault(ops, len(known)), phase) for ops, phase in issued]
    return TracedOps(list(known), order, body.again, body.tf32, body.unknown or part["unknown"])


def op_of(values: list[Any]) -> Op:
    """A kernel from its fields as JSON holds them."""
    op = Op(*values)
    return op._replace(shape=tuple(op.shape))


def _born(events: Iterable[Event]) -> int:
    return sum(event[0] == BORN for event in events)


def _left(events: Iterable[Event], first: int, last: int) -> set[int]:
    """Of the storages from the first on, up to the last, those that are never freed."""
    freed = {event[1] for event in events if event[0] == DIES}
    return {storage for storage in range(first, last) if storage not in freed}


def _end(trace: StorageTrace) -> int:
    """The number of events before the optimizer's phase."""
    for place, event in enumerate(trace.events[trace.begin :], trace.begin):
        if event[3] == OPTIMIZER:
            return place
    return len(trace.events)


def _body(trace: StorageTrace) -> tuple:
    """What happens between the beginning of a step and its optimizer's phase."""
    living, operations = Living(), trace.operations
    assert operations is not None, "traced for a GPU"
    living.follow(trace.events[: trace.begin])
    first = living.born
    events = living.follow(trace.events[trace.begin : _end(trace)])
    body = slice(first, living.born)
    before = operations.order[: operations.again[1]]
    issued = [(operations.ops[index], phase) for index, phase in before]
    return events, trace.bytes[body], trace.made_by[body], issued


def _living_at(trace: StorageTrace, end: int) -> Living:
    living = Living()
    living.follow(trace.events[:end])
    return living


def _of_sizes(sizes: list[int], storages: list[int], there: list[int]) -> list[int] | None:
    """Storages in the order of these sizes, None where they have others.

    A loss in chunks makes the gradient of shared embeddings later. Which of a size is which does
    not matter, as all are freed at once.
    """
    of_size: dict[int, list[int]] = {}
    for storage in reversed(storages):
        of_size.setdefault(there[storage], []).append(storage)
    if sorted(sizes) != sorted(there[storage] for storage in storages):
        return None
    return [of_size[size].pop() for size in sizes]


def _of_parameters(trace: StorageTrace, living: Living, end: int) -> list[int]:
    """The gradients in the order of their parameters: fused AdamW frees them so, while a backward
    pass makes them in an order of its own."""
    there = set(living.of.get(GRADIENTS, ()))
    return [event[1] for event in trace.events[end:] if event[0] == DIES and event[1] in there]
