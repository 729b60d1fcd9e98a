"""The nodes of a compiled graph: what they are called, look at, and may be written over."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from tight_fit.kernels import names
from tight_fit.torch_private import OpOverload, is_view

Node = torch.fx.Node
# What reads other numbers of a tensor than the one that it writes.
MOVED = frozenset(
    "permute transpose t cat slice select slice_scatter select_scatter expand gather flip "
    "constant_pad_nd index embedding repeat".split()
)


def name_of(node: Node) -> str:
    """The name of a node's operation, nothing for one that is none of PyTorch's."""
    return node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ""


def is_view_of(node: Node) -> bool:
    """Whether a node looks at the memory of another."""
    target = node.target
    return isinstance(target, OpOverload) and (is_view(target) or name_of(node) in names.VIEWS)


def source_of(node: Node) -> Node:
    """The node whose memory a view looks at."""
    while is_view_of(node):
        node = node.all_input_nodes[0]
    return node


def written_over(
    nodes: Collection[Node], results: Collection[Node], stays: Callable[[Node], bool]
) -> dict[Node, Node]:
    """{result: the input that it is written over} of a kernel with these nodes, as inductor's
    `decide_inplace_update` has it: one that dies here, of the same dtype and size, which this
    result alone reads, number by number.

    stays  whether a node is still read after the kernel, or belongs to others
    """
    inside = set(nodes)
    made = dict.fromkeys(one for one in map(source_of, results) if one in inside)
    readers: dict[Node, list[Node]] = {}
    moved: set[Node] = set()
    for one in made:
        work, waiting, read = {one}, [one], dict[Node, None]()
        while waiting:
            for given in waiting.pop().all_input_nodes:
                if given not in inside or given in made:
                    read[source_of(given)] = None
                elif given not in work:
                    work.add(given)
                    waiting.append(given)
        for given in read:
            readers.setdefault(given, []).append(one)
        if any(name_of(node) in MOVED for node in work):
            moved.add(one)
    found: dict[Node, Node] = {}
    for given, (one, *others) in readers.items():
        if others or one in moved or one in found or any(map(stays, _views(given))):
            continue
        old, new = given.meta.get("val"), one.meta.get("val")
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if (old.dtype, old.numel()) == (new.dtype, new.numel()):
                found[one] = given
    return found


def _views(node: Node) -> set[Node]:
    """A node and all views of its memory."""
    return {node}.union(*(_views(user) for user in node.users if is_view_of(user)))
