"""What goes over the wire: every collective that torch starts, on real ranks and on none alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from helpers.memory.tracker import WRAPPERS
from helpers.torch_private import TorchDispatchMode, tree_leaves

# What a rank sends in a ring of N, as a share of the payload; a tree or a switch may do better, none sends less than
# half of it. Payload: the whole tensor that all ranks end with (all_gather) or begin with (reduce_scatter).
SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}
NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
}
SILENT = {
    "recv_",
    "recv_any_source_",
    "wait_tensor",
    "barrier",
    "monitored_barrier_",
    "_wrap_tensor_autograd",
}  # the sender counts, or no bytes


@dataclass(frozen=True)
class SentMessage:
    """One collective, or one message: `payload` in bytes, `ranks` that take part, `axis` of the layout they lie on."""

    kind: str
    payload: int
    ranks: int
    axis: str
    phase: str

    @property
    def bytes(self) -> int:
        """Bytes that a rank sends, by a ring (Patarasuk and Yuan 2009)."""
        return round(SENT[self.kind](self.ranks) * self.payload)


class CommMeter(TorchDispatchMode):
    """Lists, while active, what this rank sends. Broadcasts count their ring's average over the ranks.

    axes   names for process groups: {group name: axis}
    Raises NotImplementedError for a collective that it does not know, so that nothing goes uncounted.
    """

    def __init__(self, axes: Mapping[str, str] | None = None):
        super().__init__()
        self.axes, self.sent, self.phase = dict(axes or {}), [], ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # its parts come by
        if function.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self._count(function.overloadpacket.__name__, args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args) -> None:
        if name in SILENT:
            return
        kind = NAMES.get(name)
        if kind is None:
            raise NotImplementedError(
                f"The collective {name} is not counted: add it to helpers/parallel/comm_meter.py."
            )
        group = _group(args)
        sizes = [
            leaf.numel() * leaf.element_size()
            for leaf in tree_leaves(args[0])
            if isinstance(leaf, torch.Tensor)
        ]
        payload = sum(sizes)
        if kind == "all_gather" and not name.endswith(
            "_"
        ):  # the functional ones are given the part
            payload *= group.size()
        if kind == "reduce_scatter" and name.endswith(
            "_"
        ):  # the others' first argument is the result
            payload *= group.size()
        if group.size() > 1:
            self.sent.append(
                SentMessage(
                    kind, payload, group.size(), self.axes.get(group.group_name, ""), self.phase
                )
            )


def _group(args) -> dist.ProcessGroup:
    names = [value for value in args if isinstance(value, str)]
    if names:  # the functional collectives name it last
        return dist.distributed_c10d._resolve_process_group(names[-1])
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    raise NotImplementedError("A collective without a process group cannot be counted.")
