"""The trace of a step at every batch size and length, from the traces of a few of them.

The sizes of storages and kernels are lines over the examples of a micro-batch and parabolas over
the tokens of an example, as attention has one number for each two of them. Six traces give both,
and further ones check them: where one is not as expected, there is no line. A single example takes
operations of its own and has a line of its own, over its tokens.

Where a loss is computed in chunks, they are lines of the trace with few of them (`chunk_lines`).

Along a further axis, the classes of a classifier or the rank of adapters, a size is a line whose
slope is a line over the examples and the tokens: four more traces give it (`extended`). Nothing
here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tight_fit.kernels.op import Op
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.plans import chunk_lines
from tight_fit.plans.batch_line import Traced
from tight_fit.plans.differences import differences, evaluated
from tight_fit.plans.living import Living
from tight_fit.trace.storage_trace import BORN, HOST, StorageTrace

MULTIPLE = 8  # of which all lengths are taken: cuBLAS copies some operands of others
STEP = 128  # tokens between two traces
Place = tuple[int, int | None]  # examples per micro-batch, tokens per example
FIRST = (2, 128)  # the least place of a line
Values = Mapping[str, int]  # {axis beside examples and tokens: the value there}
# Examples from which on all activations that grow with a step are large enough to be offloaded, and
# up to which these alone are.
MANY, MOST = 64, 1024
NUMBERS = ("flops", "read", "written")  # of an `Op`, beside its shape


class TraceLine:
    """The trace of one step at every place. `packed` is what `fitted` has made."""

    def __init__(self, packed: Mapping[str, Any]):
        self.packed = packed

    def at(
        self, place: Place, accumulation: int = 1, further: Values | None = None
    ) -> Traced | None:
        """The trace at a place, and at values of further axes; None where the line does not reach,
        or gives no whole number."""
        examples, tokens = place
        line, longest = self.packed, self.packed["longest"]
        batch, (length, _) = line["first"], _lengths_of(line)
        least = min(batch, FIRST[0])
        if not least <= examples <= line["most"] or (tokens is None) != (longest is None):
            return None
        if tokens is not None and not (
            min(length, FIRST[1]) <= tokens <= longest and tokens % line["multiple"] == 0
        ):
            return None
        split = chunk_lines.beside(line, place)
        if split is None:
            return None
        values = self.numbers(
            examples - batch,
            0 if tokens is None else tokens - length,
            {**(further or {}), **split[1]},
        )
        if values is None:
            return None
        count = len(line["made_by"])
        events = Living().events(line["events"])
        if line["smallest"] is not None and any(
            kind == BORN and category == HOST and values[storage] < line["smallest"]
            for kind, storage, category, _ in events[line["begin"] :]
        ):
            return None  # where some activations are too small to be offloaded
        sizes, rest = values[:count], iter(values[count:])
        traced_batches = min(accumulation, 2)
        flops = {name: next(rest) * accumulation // traced_batches for name in line["flops"]}
        kinds = [tuple(_op(kernel, rest) for kernel in kernels) for kernels in line["ops"]]
        begin, end, _ = line["again"]
        ops, order = _first_come(kinds, line["order"])
        operations = TracedOps(
            ops,
            order,
            (begin, end, accumulation - traced_batches),
            line["tf32"],
            line["unknown"],
        )
        names = line["names"]
        trace = StorageTrace(
            sizes,
            [names[number] for number in line["made_by"]],
            events,
            line["begin"],
            frozenset(line["reached"]),
            flops,
            operations,
        )
        if split[0]:
            more = chunk_lines.with_chunks(trace, line["chunks"]["parts"], split[0])
            assert more is not None, "chunks are put in"
            trace = more
        return trace, values[-1]

    def numbers(self, more: int, longer: int, further: Values) -> list[int] | None:
        """All numbers of the trace, `more` examples and `longer` tokens from the first place; the
        last is that of the model's parameters."""
        line, axes = self.packed, self.packed.get("axes", {})
        single, step = line["first"] == 1, _lengths_of(line)[1]
        values = evaluated(line["numbers"], single, step, more, longer)
        if values is None:
            return None
        values.append(line["parameters"])
        for name, value in further.items():
            axis = axes.get(name, {"most": 0})
            if not 2 <= value <= axis["most"] or (value - axis["base"]) % axis["step"]:
                return None
            times, part = value - axis["base"], axis["step"]
            added = evaluated(axis["numbers"], single, step, more, longer, times, part)
            if added is None:
                return None
            for index, number in zip(axis["of"], added):
                values[index] += number
        return values


def grid(
    longest: int | None,
    batch: int = FIRST[0],
    count: int = 3,
    start: tuple[int, int] | None = None,
) -> list[Place]:
    """The places whose traces make a line, from a number of examples on, at `count` lengths;
    without tokens (None) two of them. A single example makes a line by itself.

    start  the first length, and what each further one is longer
    """
    length, step = start or (FIRST[1], STEP)
    lengths = [None] if longest is None else [length + step * number for number in range(count)]
    batches = (batch, batch + 1) if batch > 1 else (batch,)
    return [(examples, tokens) for examples in batches for tokens in lengths]


def fitted(
    traces: Mapping[Place, Traced],
    longest: int | None,
    accumulation: int = 1,
    smallest: int | None = None,
    batch: int = FIRST[0],
    chunks: tuple[int, int] | None = None,
) -> TraceLine | None:
    """The line through the traces at the places of `grid`, None where there is none.

    traces    also of other places, which it has to meet; those of odd lengths it need not, and is
              then taken at multiples of `MULTIPLE` alone
    longest   tokens per example up to which it is taken
    smallest  bytes from which on activations are offloaded, None where none are. The line is then
              through places of `MANY` examples, and is taken where all that are offloaded there
              would be
    batch     examples per micro-batch of the first place, where none are offloaded
    chunks    the least tokens of one and the most of them, where the loss is computed in chunks.
              The line then begins at `chunk_lines.start_of` these
    """
    batch = batch if smallest is None else MANY
    start = None if chunks is None else chunk_lines.start_of(batch, *chunks)
    places = grid(longest, batch, start=start)
    head: dict[str, Any] = {"longest": longest, "first": batch}
    if chunks is not None:
        fewer, more = (traces[place][0] for place in (places[0], places[1 if batch == 1 else 3]))
        parts = chunk_lines.parts_of(fewer, more, min(accumulation, 2))
        if parts is None:
            return None
        head |= {"start": start, "chunks": {"of": chunks, "parts": parts}}
    kept = [
        (chunk_lines.with_few(head, place, traces[place][0]), traces[place][1]) for place in places
    ]
    if not _alike(kept):
        return None
    trace, parameters = kept[0]
    distinct: dict[tuple, int] = {}  # the kernels of an operation at all places -> its number
    order = []
    traced = [one.operations for one, _ in kept if one.operations is not None]
    for issued in zip(*(operations.order for operations in traced)):
        kernels = tuple(operations.ops[index] for operations, (index, _) in zip(traced, issued))
        order.append((distinct.setdefault(kernels, len(distinct)), issued[0][1]))
    ops, columns = [], [[*one.bytes, *one.flops.values()] for one, _ in kept]
    for kernels in distinct:
        kinds = [[_kind(op) for op in some] for some in kernels]
        if any(kind != kinds[0] for kind in kinds):
            return None
        ops.append(kinds[0])
        for column, some in zip(columns, kernels):
            column += [number for op in some for number in _numbers(op)]
    names = list(dict.fromkeys(trace.made_by))
    assert trace.operations is not None, "looked at in `_alike`"
    line = TraceLine(
        head
        | {
            "most": MOST if smallest is not None else 10**9 if batch > 1 else 1,
            "smallest": smallest,
            "multiple": 1,
            "parameters": parameters,
            "names": names,
            "made_by": [names.index(name) for name in trace.made_by],
            "events": Living().follow(trace.events),
            "begin": trace.begin,
            "reached": sorted(trace.reached),
            "flops": list(trace.flops),
            "ops": ops,
            "order": order,
            "again": trace.operations.again,
            "tf32": trace.operations.tf32,
            "unknown": trace.operations.unknown,
            "numbers": differences(columns, batch == 1),
        }
    )
    if chunks is not None and (place := chunk_lines.larger(batch, *chunks)) in traces:
        line = _with_larger_chunks(line, place, traces[place])
    missed = {
        place for place, traced in traces.items() if not equal(line.at(place, accumulation), traced)
    }
    if not missed:
        return line
    if any((tokens or 0) % MULTIPLE == 0 for _, tokens in missed):
        return None
    return TraceLine({**line.packed, "multiple": MULTIPLE})


def extended(
    line: TraceLine,
    name: str,
    values: tuple[int, int, int],
    traces: Mapping[Place, Traced],
    accumulation: int = 1,
) -> TraceLine | None:
    """The line with a further axis, None where there is none.

    values  of the axis: that of the line's own traces, that of these, and the largest one for which
            the line is taken. From the first on it is taken in steps to the second
    traces  at the places of `grid` of the line's first examples, at two lengths
    """
    packed, (base, value, most) = line.packed, values
    columns = []
    for place, traced in traces.items():
        before = line.at(place, accumulation)
        there = _column(packed, place, traced)
        usual = None if before is None else _column(packed, place, before)
        if there is None or usual is None:
            return None
        columns.append([number - other for number, other in zip(there, usual)])
    changed = [index for index, slope in enumerate(zip(*columns)) if any(slope)]
    columns = [[column[index] for index in changed] for column in columns]
    axis = {
        "base": base,
        "step": value - base,
        "most": most,
        "of": changed,
        "numbers": differences(columns, packed["first"] == 1),
    }
    return TraceLine({**packed, "axes": {**packed.get("axes", {}), name: axis}})


def _lengths_of(line: Mapping[str, Any]) -> tuple[int, int]:
    first, step = line.get("start", (FIRST[1], STEP))
    return first, step


def _with_larger_chunks(line: TraceLine, place: Place, traced: Traced) -> TraceLine:
    """The line with the tokens of a chunk as a further axis; as it is where it has none."""
    packed, (examples, tokens) = line.packed, place
    there = _column(packed, place, traced)
    length, _ = _lengths_of(packed)
    usual = line.numbers(examples - packed["first"], (tokens or 0) - length, {})
    if there is None or usual is None:
        return line
    slopes = [number - other for number, other in zip(there, usual)]
    changed = [index for index, slope in enumerate(slopes) if slope]
    column = [slopes[index] for index in changed]
    axis = {
        "base": packed["chunks"]["of"][0],
        "step": chunk_lines.LARGER,
        "most": 10**9,
        "of": changed,
        "numbers": [column] if packed["first"] == 1 else [column, [0] * len(column)],
    }
    return TraceLine({**packed, "axes": {"chunk": axis}})


def _column(line: Mapping[str, Any], place: Place, traced: Traced) -> list[int] | None:
    """The numbers of a trace in the order of a line's, and then its parameters; None where it
    differs in more than numbers."""
    trace, parameters = chunk_lines.with_few(line, place, traced[0]), traced[1]
    operations = trace.operations
    if operations is None or operations.passes or Living().follow(trace.events) != line["events"]:
        return None
    names = [line["names"][number] for number in line["made_by"]]
    about = [operations.tf32, operations.unknown, sorted(trace.reached), list(trace.flops)]
    if (
        len(trace.bytes) != len(names)
        or trace.made_by != names
        or about != [line[name] for name in ("tf32", "unknown", "reached", "flops")]
    ):
        return None
    kernels: dict[int, tuple[Op, ...]] = {}
    if len(operations.order) != len(line["order"]):
        return None
    for (index, phase), (own, same) in zip(operations.order, line["order"]):
        if phase != same or kernels.setdefault(own, operations.ops[index]) != operations.ops[index]:
            return None
    issued = [kernels[own] for own in range(len(line["ops"]))]
    if [[_kind(op) for op in some] for some in issued] != line["ops"]:
        return None
    numbers = [number for some in issued for op in some for number in _numbers(op)]
    return [*trace.bytes, *trace.flops.values(), *numbers, parameters]


def equal(one: Traced | None, other: Traced) -> bool:
    """Whether two traces have the same events, sizes and kernels, in the same order."""
    if one is None or one[0] != other[0] or one[1] != other[1]:
        return False
    return one[0].reached == other[0].reached and _issued(one[0]) == _issued(other[0])


def _issued(trace: StorageTrace) -> tuple | None:
    traced = trace.operations
    if traced is None:
        return None
    kernels = [(traced.ops[index], phase) for index, phase in traced.order]
    return kernels, traced.again, traced.tf32, traced.unknown, traced.passes


def _alike(kept: list[Traced]) -> bool:
    """Whether traces differ in numbers alone and have operations."""
    plain = []
    for trace, parameters in kept:
        traced = trace.operations
        if traced is None or traced.passes:
            return False
        without = replace(trace, bytes=[], flops=dict.fromkeys(trace.flops, 0), operations=None)
        phases = [phase for _, phase in traced.order]
        about = (traced.again, traced.tf32, traced.unknown, trace.reached, len(trace.bytes))
        plain.append((without, parameters, phases, about))
    return all(one == plain[0] for one in plain)


def _kind(op: Op) -> list[Any]:
    """What of a kernel is the same at all places."""
    return [op.name, op.kind, op.arithmetic, op.layout, op.kernels, len(op.shape)]


def _numbers(op: Op) -> list[int]:
    return [*(getattr(op, name) for name in NUMBERS), *op.shape]


def _op(kind: list[Any], numbers: Any) -> Op:
    name, sort, arithmetic, layout, kernels, dimensions = kind
    flops, read, written = (next(numbers) for _ in NUMBERS)
    shape = tuple(next(numbers) for _ in range(dimensions))
    return Op(name, sort, arithmetic, flops, read, written, shape, layout, kernels)


def _first_come(
    kinds: list[tuple[Op, ...]], order: list[list[int]]
) -> tuple[list[tuple[Op, ...]], list[tuple[int, int]]]:
    """Distinct operations in the order in which they are first issued, as a recorder has them."""
    known: dict[tuple[Op, ...], int] = {}
    issued = [(known.setdefault(kinds[index], len(known)), phase) for index, phase in order]
    return list(known), issued
