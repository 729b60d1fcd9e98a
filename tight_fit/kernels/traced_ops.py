"""The kernels of a training step, as data.

Nothing here imports PyTorch, so that the time of a step that is kept can be planned without it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tight_fit.kernels.op import PHASES, Op


@dataclass
class TracedOps:
    """The operations of one optimizer step in the order in which the CPU issues them.

    ops     the distinct operations; each is a tuple of kernels (`Op`), empty where no kernel runs
            (a view)
    order   (index into `ops`, index into `PHASES`) of each operation that was traced
    again   (begin, end, times): operations `begin` to `end` of `order` are issued `times` more
            times, at `end`
    tf32    whether its fp32 products run on tensor cores where a GPU has TF32
    passes  the positions in `order` at which the actions of a pipeline's schedule begin; empty for
            a step that is no stage of a pipeline
    unknown a sentence on the first operation that could not be described; "" where there is none
    """

    ops: list[tuple[Op, ...]] = field(default_factory=list)
    order: list[tuple[int, int]] = field(default_factory=list)
    again: tuple[int, int, int] = (0, 0, 0)
    tf32: bool = False
    unknown: str = ""
    passes: tuple[int, ...] = ()

    def repeat(self, begin: int, end: int, times: int) -> None:
        """Issue operations `begin` to `end` of `order` `times` more times after `end`.

        These are the micro-batches that are not traced because they do what an earlier one did.
        """
        self.again = begin, end, times

    def issued(self) -> np.ndarray:
        """int64 [operations, 2], `order` with what is repeated."""
        begin, end, times = self.again
        order = np.array(self.order, dtype=np.int64).reshape(-1, 2)
        return np.concatenate([order[:end], np.tile(order[begin:end], (times, 1)), order[end:]])

    def counted(self) -> Counter:
        """{(Op, phase name): times it is run} over the step."""
        begin, end, times = self.again
        runs = Counter(self.order)
        for pair, count in Counter(self.order[begin:end]).items():
            runs[pair] += count * times
        times_run: Counter = Counter()
        for (index, phase), count in runs.items():
            for op in self.ops[index]:
                times_run[op, PHASES[phase]] += count
        return times_run

    @property
    def flops(self) -> dict[str, int]:
        """Floating-point operations of matrix products, attention and convolutions, by phase."""
        total = dict.fromkeys(PHASES, 0)
        for (op, phase), times in self.counted().items():
            total[phase] += op.flops * times
        return total

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that the kernels read and write, by phase."""
        total = dict.fromkeys(PHASES, 0)
        for (op, phase), times in self.counted().items():
            total[phase] += (op.read + op.written) * times
        return total
