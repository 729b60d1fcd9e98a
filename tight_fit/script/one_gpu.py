"""The one GPU of a plan: its number, the part of its memory that a program takes, what it is not.

A program may choose any one GPU by its number. What needs a second, or what a plan without values
cannot do, is refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tight_fit.script.sandbox import NotPlanned
from tight_fit.trace.gpu_calls import Places

SEVERAL = (
    "one GPU is planned: for several use DistributedDataParallel or fully_shard, and plan one of "
    "their ranks with --ranks"
)
GRAPH = (
    "records a CUDA graph, which is not planned: leave it out for the plan, and keep in mind that "
    "a graph holds the memory of its step as long as it lives"
)


class OneGPU:
    """The GPU that a program uses.

    current   the number that `set_device` has chosen
    fraction  of the GPU's memory that the program lets PyTorch have, and the line that says so
    """

    def __init__(self, places: Places):
        self.places, self.current, self.fraction = places, 0, (1.0, "")
        self._chosen = False

    def take(self, device: Any) -> None:
        """Note that a device is used. Raises NotPlanned for a second GPU."""
        if device is not None and not isinstance(device, int):
            device = torch.device(device)
            if device.type != "cuda":
                return
            device = device.index
        number = self.current if device is None else int(device)
        if self._chosen and number != self.places.gpu.index:
            raise NotPlanned(
                f"uses cuda:{number} beside cuda:{self.places.gpu.index}, and {SEVERAL}"
            )
        self._chosen, self.places.gpu = True, torch.device("cuda", number)

    def set_device(self, device: Any) -> None:
        """What `torch.cuda.set_device` does."""
        number = device if isinstance(device, int) else torch.device(device).index
        self.current = self.current if number is None or number < 0 else number


@contextmanager
def only(say: Callable[[str], None], line: Callable[[], str]) -> Iterator[None]:
    """Inside, what needs more than one GPU, or a real one, is refused; `say` takes a note."""

    def alone(model, module, device_ids=None, output_device=None, dim=0):
        if device_ids is not None and len(device_ids) > 1:
            raise NotPlanned(f"lays nn.DataParallel over {len(device_ids)} GPUs, and {SEVERAL}")
        nn.Module.__init__(model)
        model.module, model.device_ids = module, []
        say(
            f"{line()}: nn.DataParallel is planned with one GPU, as its module alone. With several "
            "the first holds more than the others: DistributedDataParallel is planned by --ranks."
        )

    def no_graph(*args: Any, **kwargs: Any) -> Any:
        raise NotPlanned(GRAPH)

    with ExitStack() as patches:
        patches.enter_context(patch.object(nn.DataParallel, "__init__", alone))
        for name in ("CUDAGraph", "graph", "make_graphed_callables"):
            patches.enter_context(patch.object(torch.cuda, name, no_graph))
        yield
