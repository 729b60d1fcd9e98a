"""torch.cuda on a pretended GPU: what Python asks, answered by the library and the book.

PyTorch's own Python stays in place. What it finds in a compiled module of a build with CUDA is put
there, and only what asks a build or a driver in another way is answered here.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tight_fit.gpus import VISIBLE, WORKSPACE
from tools.pretend import cards
from tools.pretend.book import Book
from tools.pretend.streams import Stream, StreamEvent

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90"]  # for which this "build" has kernels


class PretendedCUDA:
    """The state of CUDA in this process: it starts when it is first needed, as the real one does.

    library  the compiled one, already loaded
    card     the kind of every GPU
    count    of GPUs in the machine; CUDA_VISIBLE_DEVICES hides some of them until CUDA starts
    """

    def __init__(self, library: ctypes.CDLL, card: cards.Card, count: int):
        self.library, self.card, self.machine = library, card, count
        self.seen = -1
        library.pretended_waits.restype = ctypes.c_int64
        library.pretended_waits.argtypes = [ctypes.c_int64]
        StreamEvent.waits = staticmethod(library.pretended_waits)
        library.pretended_freed.restype = ctypes.c_int64
        library.pretended_freed.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self.book = Book(count, card.gpu.memory - cards.CONTEXT, library.pretended_freed)
        library.pretended_card.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_int64,
        ]
        self.tell()
        library.pretended_book(self.book.callback)
        atexit.register(library.pretended_book, None)
        self.forked = False  # whether this process is a copy of one that has used CUDA
        os.register_at_fork(after_in_child=self._copied)

    def tell(self) -> None:
        """Tell the library how many GPUs there are, and of which kind."""
        major, minor = self.card.gpu.capability
        count = cards.visible(self.machine) if self.seen < 0 else self.seen
        self.library.pretended_card(count, 10 * major + minor, self.card.gpu.memory, WORKSPACE)

    def count(self) -> int:
        """Visible GPUs. Like the driver, it reads CUDA_VISIBLE_DEVICES once."""
        if self.seen < 0:
            self.seen = cards.visible(self.machine)
            self.tell()
        return self.seen

    def start(self) -> None:
        """What `torch.cuda._lazy_init` calls. Raises RuntimeError where no GPU is visible."""
        if not self.count():
            raise RuntimeError("No CUDA GPUs are available")

    def _copied(self) -> None:
        self.forked = torch.cuda._initialized

    def current(self) -> int:
        return self.library.pretended_current()

    def synchronize(self, device: object = None) -> None:
        """Everything has been done; the wait counts, as times of events may be read after it."""
        self.library.pretended_waits(1)

    def exchange(self, device: int) -> int:
        """Make a GPU the current one, and give the number of the one before.

        Raises RuntimeError, in CUDA's words, for a GPU that is not there.
        """
        before = self.current()
        if device >= 0:
            torch.cuda._lazy_init()
            if device >= self.count():
                raise RuntimeError(f"CUDA error: invalid device ordinal {device} (see {VISIBLE})")
            self.library.pretended_set_current(device)
        return before

    def properties(self, device: int) -> SimpleNamespace:
        """What the driver says of a GPU."""
        major, minor = self.card.gpu.capability
        return SimpleNamespace(
            name=self.card.driver,
            total_memory=self.card.gpu.memory,
            major=major,
            minor=minor,
            multi_processor_count=self.card.processors,
            L2_cache_size=self.card.cache,
            is_integrated=0,
            is_multi_gpu_board=0,
            warp_size=32,
            max_threads_per_multi_processor=1024 if minor else 2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=65536,
            gcnArchName="",
            uuid="GPU-pretended",
        )

    def free_memory(self, device: int) -> tuple[int, int]:
        """(free bytes, all bytes) of a GPU, as the driver counts them."""
        reserved = self.book.now(device).reserved
        return self.card.gpu.memory - cards.CONTEXT - reserved, self.card.gpu.memory

    def limit(self, fraction: float, device: int) -> None:
        self.book.limit(device, int(fraction * self.card.gpu.memory))


class DefaultGenerator:
    """The default generator of a GPU, as far as Python asks it."""

    def __init__(self, device: int):
        self.index, self.device = device, torch.device("cuda", device)

    def manual_seed(self, value: int) -> DefaultGenerator:
        torch.ops.pretended.seed(self.index, value)
        return self

    def initial_seed(self) -> int:
        return torch.ops.pretended.initial_seed(self.index)

    def get_state(self) -> torch.Tensor:
        return torch.ops.pretended.random_state(self.index)

    def set_state(self, state: torch.Tensor) -> DefaultGenerator:
        if state.is_cuda:
            raise TypeError("RNG state must be a torch.ByteTensor")
        torch.ops.pretended.set_random_state(self.index, state)
        return self


def install(cuda: PretendedCUDA) -> None:
    """Put the answers of `cuda` into torch.cuda, and into what else asks for a GPU."""
    for name, answer in _answers(cuda).items():
        for place in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
            if place is torch.cuda or hasattr(place, name):
                setattr(place, name, answer)
    torch.cuda.has_half = True
    torch.cuda.default_generators = tuple(DefaultGenerator(i) for i in range(cuda.machine))
    for name, answer in _answers_in_c(cuda).items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, answer)
    ranges = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA")
    torch.cuda.nvtx._nvtx = SimpleNamespace(**{name: lambda *given: 0 for name in ranges})
    torch.version.cuda = "12.8"
    torch.backends.cuda.is_built = lambda: True
    torch.Tensor.pin_memory = _pinned
    torch.Tensor.is_pinned = lambda self, device=None: _place(self) in PINNED
    torch.Tensor.record_stream = lambda self, stream: None
    for name, answer in _accelerator(cuda).items():
        setattr(torch.accelerator, name, answer)
    torch.UntypedStorage.resize_ = _resize_of(torch.UntypedStorage.resize_)


# Where the storages are that were pinned. A place may be taken again by one that was not: it then
# counts as pinned, and `pin_memory` copies nothing.
PINNED: set[int] = set()


def _place(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor is, 0 for one without values."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _pinned(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """A tensor's `pin_memory`: a copy whose storage counts as pinned."""
    if tensor.is_cuda:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    if tensor.is_pinned():
        return tensor
    made = tensor.clone()
    if _place(made):
        PINNED.add(_place(made))
    return made


def _resize_of(resize: Callable) -> Callable:
    """A storage's `resize_`, which builds of PyTorch without CUDA refuse for one of a GPU."""

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize(storage, size)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.ops.pretended.resize_storage(whole, int(size))
        return storage

    return resize_


def _answers(cuda: PretendedCUDA) -> dict[str, Any]:
    """Functions and classes of torch.cuda that do not ask PyTorch's compiled module."""
    return {
        "device_count": cuda.count,
        "_is_in_bad_fork": lambda: cuda.forked,
        "_get_device_properties": cuda.properties,
        "_cudart": SimpleNamespace(cudaMemGetInfo=cuda.free_memory),
        "memory_summary": lambda device=None, **kwargs: str(torch.cuda.memory_stats(device)),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": StreamEvent,
        "current_stream": lambda device=None: Stream(device),
        "default_stream": lambda device=None: Stream(device),
        "set_stream": lambda given: None,
        "is_current_stream_capturing": lambda: False,
        # Two functions, as in torch: TorchDynamo keeps a handler for each.
        "_exchange_device": lambda device: cuda.exchange(device),
        "_maybe_exchange_device": lambda device: cuda.exchange(device),
    }


def _answers_in_c(cuda: PretendedCUDA) -> dict[str, Callable]:
    """Functions that a PyTorch with CUDA has in its compiled module."""
    return {
        "_cuda_isInBadFork": lambda: cuda.forked,
        "_cuda_init": cuda.start,
        "_cuda_getDeviceCount": cuda.count,
        "_cuda_getDevice": cuda.current,
        "_cuda_setDevice": cuda.exchange,
        "_cuda_exchangeDevice": cuda.exchange,
        "_cuda_maybeExchangeDevice": cuda.exchange,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_getCurrentBlasHandle": lambda: 0,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_memoryStats": cuda.book.stats,
        "_cuda_resetPeakMemoryStats": lambda device: cuda.book.now(device).reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_setMemoryFraction": cuda.limit,
        "_cuda_synchronize": cuda.synchronize,
        "_cuda_emptyCache": cuda.book.empty_cache,
        "_cuda_clearCublasWorkspaces": lambda: cuda.library.pretended_clear_workspaces(),
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_getArchFlags": lambda: " ".join(ARCHITECTURES),
        "_cuda_canDeviceAccessPeer": lambda *devices: True,
        "_cuda_record_memory_history": cuda.book.record,
        "_cuda_memorySnapshot": cuda.book.snapshot,
        # What torch._inductor imports for CUDA graphs, which nothing records here.
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_nccl_version": lambda: 2 << 32 | 27 << 16,
        "_nccl_version_suffix": lambda: b"",
    }


def _accelerator(cuda: PretendedCUDA) -> dict[str, Callable]:
    """Functions of torch.accelerator."""
    return {
        "is_available": lambda: cuda.count() > 0,
        "device_count": cuda.count,
        "current_accelerator": lambda check_available=False: (
            torch.device("cuda") if cuda.count() else None
        ),
        "synchronize": cuda.synchronize,
        "current_device_index": cuda.current,
        "current_stream": lambda device=None: Stream(device),
        "set_device_index": torch.cuda.set_device,
        "empty_cache": cuda.book.empty_cache,
    }
