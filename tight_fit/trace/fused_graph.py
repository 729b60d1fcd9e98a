"""A graph that `torch.compile` has cut, run on tensors without values as its kernels would run it.

Inductor fuses what moves bytes: operations element by element, casts, copies, look-ups of rows, and
reductions, into kernels that keep what lies between in registers. Products, attention and whatever
else is not known here run by themselves. The rules of this module: operations that fuse and follow
one another without another kind between them are one kernel, which reads each input once and
writes what others need; what was reduced over a whole tensor or over its rows, and is then used for
each of its numbers (the scale of a cast to 8 bits), is used by a kernel after it; sums over rows
(gradients of weights) are one more, which reads its inputs again; and what is computed element by
element from at most `READS` tensors is computed again by each kernel that reads it, unless it has
to be in memory for another kind (inductor's rule too, its `realize_reads_threshold`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tight_fit.kernels import names
from tight_fit.kernels.op import Op
from tight_fit.kernels.sizes import arithmetic, tensors, touched
from tight_fit.techniques.eight_bits import PRODUCT
from tight_fit.torch_private import OpOverload, storage_key
from tight_fit.trace.graph_nodes import Node, is_view_of, name_of, source_of, written_over
from tight_fit.trace.tracker import Tracker

READS = 4
ROWS = frozenset("sum mean amax amin var var_mean prod any all".split())
FUSED = (
    ROWS
    | names.COPIES
    | names.FILLS
    | names.GATHERS
    | frozenset(
        "cat convert_element_type iota copy constant_pad_nd repeat slice_scatter select_scatter "
        "inductor_seeds inductor_lookup_seed inductor_random".split()
    )
)
ONCE = ROWS | frozenset("copy_ inductor_seeds inductor_lookup_seed inductor_random".split())


@dataclass
class KernelGroup:
    """Nodes that run together.

    fused    whether they are one or several fused kernels; else one operation, and what is taken
             of its results
    results  nodes that others read
    kernels  of a fused unit
    dead     nodes of the graph that nothing reads any more when the unit has run
    reused   {a result that is written over an input: that input}
    """

    nodes: list[Node]
    fused: bool
    results: list[Node] = field(default_factory=list)
    kernels: tuple[Op, ...] = ()
    dead: list[Node] = field(default_factory=list)
    reused: dict[Node, Node] = field(default_factory=dict)


class FusedGraph:
    """A graph of a forward or backward pass, run kernel by kernel under a tracker.

    graph     as `torch_private.inductor` gives it; it is changed
    backward  whether it is that of a backward pass
    """

    def __init__(self, graph: torch.fx.GraphModule, backward: bool, tracker: Tracker):
        self.module, self.backward, self.tracker = graph, backward, tracker
        level = _levels(graph.graph)
        nodes = list(graph.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.output = nodes[-1]
        self.units = _in_order(_units(nodes, level), nodes)
        last = dict.fromkeys(self.inputs, 0)
        for number, unit in enumerate(self.units):
            inside = set(unit.nodes)
            unit.results = [node for node in unit.nodes if set(node.users) - inside]
            unit.kernels = tuple(_kernels(unit)) if unit.fused else ()
            for node in (*unit.nodes, *_read(unit.nodes)):
                last[node] = number
        for node, number in last.items():
            if self.output not in node.users:
                self.units[number].dead.append(node)
        # Not with casts to 8 bits: what inductor holds around them is more than is planned so.
        in_8_bits = any(node.target is PRODUCT for node in nodes)
        donated = graph.meta.get("donated", ())
        others = {node for place, node in enumerate(self.inputs) if place not in donated}
        for number, unit in enumerate(self.units):

            def stays(node: Node, number: int = number) -> bool:
                return node in others or self.output in node.users or last.get(node, 0) > number

            if unit.fused and not in_8_bits:
                unit.reused = written_over(unit.nodes, unit.results, stays)

    def __call__(self, arguments: list) -> Any:
        with self.tracker.paused():  # what is computed again is told by gradients that are on
            given = [
                value.detach() if isinstance(value, torch.Tensor) else value for value in arguments
            ]
        arguments.clear()
        values = dict(zip(self.inputs, given))
        del given
        for unit in self.units:
            with torch.set_grad_enabled(not self.backward or _is_forward(unit)):
                self._run(unit, values)
        return torch.fx.node.map_arg(self.output.args[0], values.__getitem__)

    def _run(self, unit: KernelGroup, values: dict[Node, Any]) -> None:
        if not unit.fused:
            for node in unit.nodes:
                values[node] = self._value(node, values)
        else:
            before = {
                storage_key(tensor.untyped_storage())
                for node in _read(unit.nodes)
                for tensor in tensors(values[node])
            }
            with self.tracker.paused():
                for node in unit.nodes:
                    values[node] = self._value(node, values)
            made = [tensor for node in unit.results for tensor in tensors(values[node])]
            reused = [(values[old], values[new]) for new, old in unit.reused.items()]
            for node in set(unit.nodes) - set(unit.results):
                del values[node]
            new = [one for one in made if storage_key(one.untyped_storage()) not in before]
            self.tracker.fused(new, unit.kernels, reused)
            del reused
        for node in unit.dead:
            values.pop(node, None)

    def _value(self, node: Node, values: dict[Node, Any]) -> Any:
        if node.op == "get_attr":
            return getattr(self.module, str(node.target))
        given: Any = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        function: Any = node.target
        args, kwargs = given
        if isinstance(function, OpOverload) or not hasattr(function, "name"):
            return function(*args, **kwargs)
        # What draws random numbers in both passes; a GPU's state takes 16 bytes.
        if function.name() == "run_and_save_rng_state":
            return torch.empty(16, dtype=torch.uint8), args[0](*args[1:], **kwargs)
        if function.name() == "run_with_rng_state":
            return args[1](*args[2:], **kwargs)
        raise NotImplementedError(f"{function.name()} of a compiled layer is not planned.")


def _is_forward(unit: KernelGroup) -> bool:
    """Whether the partitioner took a unit from the forward pass."""
    return all(node.meta.get("partitioner_tag") != "is_backward" for node in unit.nodes)


def _fuses(node: Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return _fuses(node.all_input_nodes[0])
    if not isinstance(target, OpOverload):
        return False
    return is_view_of(node) or torch.Tag.pointwise in target.tags or name_of(node) in FUSED


def _read(nodes: Iterable[Node]) -> list[Node]:
    """What nodes read and none of them makes."""
    inside = set(nodes)
    every = dict.fromkeys(given for node in nodes for given in node.all_input_nodes)
    return [node for node in every if node not in inside]


def _bytes(node: Node) -> int:
    return sum(map(touched, tensors(node.meta.get("val"))))


def _bytes_read(work: set[Node]) -> int:
    """Bytes of what a kernel reads, each tensor once, however many views of it there are."""
    sizes: dict[Node, int] = {}
    for node in work:
        for given in () if is_view_of(node) else node.all_input_nodes:
            source = source_of(given)
            if source not in work:
                sizes[source] = max(sizes.get(source, 0), _bytes(given))
    return sum(sizes.values())


def _in_memory(graph: torch.fx.Graph) -> set[Node]:
    """What a kernel of its own writes, and every other kernel reads."""
    found: set[Node] = set()
    read: dict[Node, set[Node]] = {}

    def others_need(node: Node) -> bool:
        return any(
            others_need(user) if is_view_of(user) else not _fuses(user) for user in node.users
        )

    for node in graph.nodes:
        if is_view_of(node):
            read[node] = read[node.all_input_nodes[0]]
            continue
        read[node] = set().union(*(read[given] for given in node.all_input_nodes))
        once = node.target is operator.getitem or name_of(node) in ONCE
        again = _fuses(node) and not once and not others_need(node)
        if not again or (len(node.users) > 1 and len(read[node]) > READS):
            found.add(node)
            read[node] = {node}
    return found


def _alike(node: Node, given: Node) -> bool:
    """Whether a node runs together with one that it reads, as far as their kinds go."""
    return node.target is operator.getitem or (_fuses(node) and _fuses(given))


def _levels(graph: torch.fx.Graph) -> dict[Node, int]:
    """How often the kind changes on the longest way to each node.

    Nodes of a level never wait for each other through another kind. What is not in memory goes to
    the levels of those that read it; the graph gets a copy for each.
    """
    memory, nodes = _in_memory(graph), list(graph.nodes)
    level: dict[Node, int] = {}
    waits: set[Node] = set()  # what is there when a whole tensor, or all of its rows, were read
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        level[node] = 0
        for given in node.all_input_nodes:
            if given in level:
                again = given in waits and _numbers(node) > _numbers(given)
                level[node] = max(level[node], level[given] + (again or not _alike(node, given)))
                if given in waits and not again and _fuses(node):
                    waits.add(node)
        if _reduces(node, whole=True):
            waits.add(node)
    for node in reversed(nodes):
        if node not in level or node in memory:
            continue
        readers: dict[int, list[Node]] = {}
        for user in node.users:
            at = level[user] if user in level and _fuses(user) else level[node]
            readers.setdefault(at, []).append(user)
        first, *others = readers or {level[node]: []}
        level[node] = first
        for at in others:
            with graph.inserting_after(node):
                copy = graph.node_copy(node)
            level[copy] = at
            for user in readers[at]:
                user.replace_input_with(node, copy)
    return level


def _units(nodes: list[Node], level: dict[Node, int]) -> list[KernelGroup]:
    """The nodes in groups: of one level, and connected."""
    calls = [node for node in nodes if node in level]
    joined = {node: node for node in calls}

    def first(node: Node) -> Node:
        while joined[node] is not node:
            node = joined[node]
        return node

    for node in calls:
        for given in node.all_input_nodes:
            if given in level and level[given] == level[node] and _alike(node, given):
                joined[first(node)] = first(given)
    groups: dict[Node, list[Node]] = {}
    for node in calls:
        groups.setdefault(first(node), []).append(node)
    return [KernelGroup(group, _fuses(group[0])) for group in groups.values()]


def _in_order(units: list[KernelGroup], nodes: list[Node]) -> list[KernelGroup]:
    """Units in the order of the graph, fused ones as late as what needs them lets them be."""
    place = {node: number for number, node in enumerate(nodes)}
    home = {node: unit for unit in units for node in unit.nodes}
    order: dict[int, KernelGroup] = {}

    def visit(unit: KernelGroup) -> None:
        if id(unit) not in order:
            for given in sorted(_read(unit.nodes), key=place.__getitem__):
                if given in home:
                    visit(home[given])
            order[id(unit)] = unit

    for unit in sorted(units, key=lambda unit: (unit.fused, place[unit.nodes[0]])):
        visit(unit)
    return list(order.values())


def _reduces(node: Node, whole: bool = False) -> bool:
    """Whether a node reduces its rows to one; with `whole` also one that reduces all to a number.

    Those that reduce each row do not.
    """
    if name_of(node) not in ROWS:
        return False
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    last = node.args[0].meta["val"].dim() - 1  # type: ignore[union-attr]
    if dims is None or dims == [] or not isinstance(dims, (list, int)):
        return whole
    each = [dims] if isinstance(dims, int) else dims
    return all(dim % (last + 1) != last for dim in each)


def _numbers(node: Node) -> int:
    return max((tensor.numel() for tensor in tensors(node.meta.get("val"))), default=0)


def _kernels(unit: KernelGroup) -> list[Op]:
    """The kernels of a fused unit: one, and one more for its sums over rows.

    The second reads what the first one writes, and computes again what it does not write.
    """
    inside = set(unit.nodes)

    def work_of(results: Iterable[Node], there: Collection[Node] = ()) -> set[Node]:
        """The nodes of a kernel with these results, beside what is there."""
        work: set[Node] = set()
        waiting = [*results]
        while waiting:
            node = waiting.pop()
            if node in inside and node not in work and node not in there:
                work.add(node)
                waiting += node.all_input_nodes
        return work

    sums = {one: any(map(_reduces, work_of([one]))) for one in unit.results}
    written = {source_of(one) for one in unit.results if not sums[one]} & inside
    rows = {source_of(one) for one in unit.results if sums[one]} - written
    found = []
    for results, work in ((written, work_of(written)), (rows, work_of(rows, written))):
        if results:
            first = next(node for node in map(source_of, unit.results) if node in results)
            kind = "norm" if any(name_of(node) in ROWS for node in work) else "elementwise"
            if any(map(_turns, work)):
                kind = "transpose"
            found.append(
                Op(
                    "fused",
                    "reduction" if results is rows else kind,
                    arithmetic(tensors(first.meta["val"])[0]),
                    0,
                    _bytes_read(work),
                    sum(map(_bytes, results)),
                    (),
                    "columns" if results is rows else "",
                )
            )
    return found


def _turns(node: Node) -> bool:
    """Whether a node writes a matrix in 8 bits as rows that was computed in columns."""
    if name_of(node) != "clone" or node.meta["val"].element_size() > 1:
        return False
    given = node.all_input_nodes[0].meta["val"]
    return given.dim() == 2 and given.stride(-1) != 1 == node.meta["val"].stride(-1)
