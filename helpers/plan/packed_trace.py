"""A traced step as a short text, so that its time on any GPU can be planned from a file.

The layers of a model are alike, so the order of the operations compresses to a few kilobytes.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from functools import cached_property

from tight_fit.kernels.op import Op
from tight_fit.kernels.traced_ops import TracedOps

COLUMNS = 96  # of a line of the text


class PackedTrace:
    """A `TracedOps` as lines of text, unpacked when it is first asked for.

    Two are equal where the traces are, whatever version of zlib has packed them.
    """

    def __init__(self, lines: Iterable[str]):
        self.lines = tuple(lines)

    @classmethod
    def of(cls, traced: TracedOps) -> PackedTrace:
        """The lines of a trace: JSON, compressed by zlib, in base64."""
        indices, phases = zip(*traced.order) if traced.order else ((), ())
        values = [
            traced.ops,
            indices,
            phases,
            traced.again,
            traced.tf32,
            traced.unknown,
            traced.passes,
        ]
        data = zlib.compress(json.dumps(values, separators=(",", ":")).encode(), 9)
        text = base64.b64encode(data).decode()
        return cls(text[begin : begin + COLUMNS] for begin in range(0, len(text), COLUMNS))

    @cached_property
    def traced(self) -> TracedOps:
        """The trace. Raises ValueError for lines that hold none."""
        try:
            values = json.loads(zlib.decompress(base64.b64decode("".join(self.lines))))
            ops, indices, phases, again, tf32, unknown, passes = values
        except (ValueError, zlib.error) as error:
            raise ValueError(f"This is not a packed trace ({error}): make it anew.") from error
        return TracedOps(
            [tuple(_op(values) for values in kernels) for kernels in ops],
            list(zip(indices, phases)),
            tuple(again),
            tf32,
            unknown,
            tuple(passes),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedTrace) and self.traced == other.traced

    def __hash__(self) -> int:
        return hash((len(self.traced.ops), len(self.traced.order)))


def _op(values: list) -> Op:
    op = Op(*values)
    return op._replace(shape=tuple(op.shape))
