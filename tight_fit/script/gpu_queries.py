"""What a program is told of the GPU that was asked for: `torch.cuda` and `torch.accelerator`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tight_fit.gpus import CONTEXT, GPU
from tight_fit.script.one_gpu import OneGPU

# Functions of torch.cuda that have nothing to do here.
NOTHING = (
    "init synchronize empty_cache ipc_collect manual_seed manual_seed_all seed seed_all "
    "set_rng_state set_rng_state_all"
).split()
# Those that torch.accelerator has by the same name.
ALSO_OF_ACCELERATOR = (
    "is_available device_count current_stream synchronize empty_cache memory_allocated "
    "max_memory_allocated memory_reserved max_memory_reserved reset_peak_memory_stats"
).split()


class _Moment:
    """A stream or an event of a GPU on which everything is done at once."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def elapsed_time(self, other: object) -> float:
        """Milliseconds between two events."""
        return 1.0

    def query(self) -> bool:
        """Whether everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being recorded."""
        return False

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        """What needs no answer."""

    record = wait = synchronize = wait_stream = wait_event = record_event = nothing


class Bytes:
    """What the tracker counts, for `torch.cuda.memory_allocated` and its kin."""

    def __init__(self, alive: Callable[[], tuple[int, int]], reset: Callable[[], None]):
        self.alive, self.reset = alive, reset

    def now(self, device: object = None) -> int:
        """Bytes alive."""
        return self.alive()[0]

    def most(self, device: object = None) -> int:
        """Most bytes that were alive since the last reset."""
        return self.alive()[1]


@contextmanager
def answered(
    gpu: GPU, held: Bytes, one: OneGPU, line: Callable[[], str], count: int = 1
) -> Iterator[None]:
    """Inside, programs find `count` GPUs of this kind; `one` is told which is used, `line()` where.

    Memory is that of the plan: bytes of tensors, without what the allocator adds. What is free is
    what they and the CUDA context leave.
    """
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory,
        multi_processor_count=40,
        is_integrated=0,
        warp_size=32,
    )

    def limited(fraction: float, device: Any = None) -> None:
        one.fraction = fraction, line()

    state = torch.zeros(16, dtype=torch.uint8)  # of a GPU's random number generator
    answers: dict[str, Any] = {
        **dict.fromkeys(NOTHING, _Moment().nothing),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or gpu.bf16,
        "device_count": lambda: count,
        "current_device": lambda: one.current,
        "set_device": one.set_device,
        "get_rng_state": lambda device=None: state,
        "get_rng_state_all": lambda: [state],
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: [f"sm_{gpu.capability[0]}{gpu.capability[1]}"],
        "mem_get_info": lambda device=None: (gpu.memory - CONTEXT - held.now(), gpu.memory),
        "memory_allocated": held.now,
        "memory_reserved": held.now,
        "max_memory_allocated": held.most,
        "max_memory_reserved": held.most,
        "reset_peak_memory_stats": lambda device=None: held.reset(),
        "reset_max_memory_allocated": lambda device=None: held.reset(),
        "memory_stats": lambda device=None: {"allocated_bytes.all.peak": held.most()},
        "memory_summary": lambda *args, **kwargs: "",
        "is_current_stream_capturing": lambda: False,
        "set_per_process_memory_fraction": limited,
        "utilization": lambda device=None: 0,
        "device": lambda device=None: nullcontext(),
        "stream": lambda stream=None: nullcontext(),
        "current_stream": lambda device=None: _Moment(),
        "default_stream": lambda device=None: _Moment(),
        "Stream": _Moment,
        "Event": _Moment,
    }
    accelerator = {name: answers[name] for name in ALSO_OF_ACCELERATOR} | {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: one.current,
        "current_device_idx": lambda: one.current,
        "set_device_index": one.set_device,
        "set_device_idx": one.set_device,
    }
    random = {name: answers[name] for name in answers if "rng_state" in name}
    owners: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, answers),
        (torch.accelerator, accelerator),
        (torch.cuda.random, random),
    ]
    with ExitStack() as patches:
        for owner, names in owners:
            for name, value in names.items():
                if hasattr(owner, name):
                    patches.enter_context(patch.object(owner, name, value))
        yield
