"""Counts what a rank sends: every collective that torch starts, on real ranks and without any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tight_fit.kernels.op import Op
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.layouts.torch_private_ranks import process_group
from tight_fit.torch_private import PlainDispatchMode, has_wrapper, tree_leaves

# What a rank sends in a ring of n ranks (Patarasuk and Yuan 2009), divided by the payload. A tree
# or a switch may need less, but none less than half of it. The payload is the whole tensor that all
# ranks end with (all_gather) or begin with (reduce_scatter). Of an all_to_all it is what the rank
# begins with, of which equal parts go to all ranks, its own included.
SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}
# torch's operators: the collective that each is.
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
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "send",  # by which a ring passes tensors on; see `CommMeter._count`
    "send": "send",
}
# Operators that send nothing, or whose bytes the sender counts.
SILENT = {
    "recv_",
    "recv_any_source_",
    "wait_tensor",
    "barrier",
    "monitored_barrier_",
    "_wrap_tensor_autograd",
}


@dataclass(frozen=True)
class SentMessage:
    """One collective, or one point-to-point message.

    kind     a key of `SENT`
    payload  bytes of the whole tensor
    ranks    how many take part
    axis     of the layout that these ranks lie on: "data", "pipeline", "tensor", "expert",
             "expert_data" (the ranks that hold the same experts), or "" if not named
    phase    of the step: "forward", "backward", "optimizer", or "" if not told
    """

    kind: str
    payload: int
    ranks: int
    axis: str
    phase: str

    @property
    def bytes(self) -> int:
        """Bytes that a rank sends, by a ring (Patarasuk and Yuan 2009)."""
        return round(SENT[self.kind](self.ranks) * self.payload)


class CommMeter(PlainDispatchMode):
    """Lists in `sent`, while active, what this rank sends.

    For a broadcast that is the ring's average over the ranks. Collectives of a single rank are left
    out. Set `phase` to have it written into the messages.

    axes  {name of a process group: axis of the layout}
    told  is called after each message that was counted, before the message itself is dispatched on
    Raises NotImplementedError for a collective that it does not know, so that none goes uncounted.
    """

    def __init__(
        self, axes: Mapping[str, str] | None = None, told: Callable[[], object] = lambda: None
    ):
        super().__init__()
        self.told = told
        self.axes = dict(axes or {})
        self.sent: list[SentMessage] = []
        self.phase = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if has_wrapper(types):
            return NotImplemented  # the tensors inside are dispatched again, one by one
        if function.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self._count(function.overloadpacket.__name__, args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if name in SILENT:
            return
        kind = NAMES.get(name)
        if kind is None:
            raise NotImplementedError(
                f"The collective {name} is not counted: add it to tight_fit/layouts/messages.py."
            )
        group = process_group(args)
        if group is None:
            raise NotImplementedError(
                f"The collective {name} has no process group: call it with one."
            )
        payload = sum(
            leaf.numel() * leaf.element_size()
            for leaf in tree_leaves(args[1] if name == "alltoall_base_" else args[0])
            if isinstance(leaf, torch.Tensor)
        )
        if name == "all_to_all_single" and sum(size > 0 for size in args[2]) != 1:
            raise NotImplementedError(
                "An all-to-all that sends unequal parts to several ranks is not counted: add it to "
                "tight_fit/layouts/messages.py."
            )
        in_place = name.endswith("_")
        # The first argument is one rank's part: the input of a functional all-gather, the result of
        # a reduce-scatter in place. Of an all-to-all it is what comes, and the second what goes.
        if (kind == "all_gather" and not in_place) or (kind == "reduce_scatter" and in_place):
            payload *= group.size()
        if group.size() > 1:
            axis = self.axes.get(group.group_name, "")
            self.sent.append(SentMessage(kind, payload, group.size(), axis, self.phase))
            self.told()


def place_messages(traced: TracedOps, places: Sequence[int], sent: Sequence[SentMessage]) -> None:
    """Write into a trace what is sent at each place of its order, as `Op` describes messages."""
    known: dict[Op, int] = {}
    for place, message in zip(places, sent, strict=True):
        op = Op(
            message.kind, "message", "fp32", 0, message.payload, 0, (message.ranks,), message.axis
        )
        index = known.setdefault(op, len(traced.ops))
        if index == len(traced.ops):
            traced.ops.append((op,))
        traced.order[place] = index, traced.order[place][1]
