"""What startup/sitecustomize.py does to modules of other libraries, and of the planner's base.

`narrow`, `true_size` and `nccl` have what it does to the others.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

# The modules of this package are imported inside the functions: they import some of those that
# are changed here.
_library: ctypes.CDLL | None = None


@contextmanager
def around(name: str) -> Iterator[None]:
    """The import of a module itself: the library comes before torch, bitsandbytes sees no GPU.

    bitsandbytes would load its own library for CUDA, which cannot run here; its kernels for the CPU
    answer instead.
    """
    global _library
    if name == "torch":
        from tools.pretend import build

        _library = ctypes.CDLL(str(build.library()))
        _library.pretended_current.restype = ctypes.c_int
    if name != "bitsandbytes":
        yield
        return
    import torch

    available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = available


def change_torch(module: ModuleType) -> None:
    from tools.pretend import cards, cuda

    asked = cards.asked()
    assert asked is not None and _library is not None  # sitecustomize.py has looked
    cuda.install(cuda.PretendedCUDA(_library, *asked))


def change_trace_rules(module: ModuleType) -> None:
    """TorchDynamo asks for the current stream; what answers here must not be traced in its turn."""
    module.add("tools.pretend")


def change_inductor(module: ModuleType) -> None:
    """What would be compiled for a GPU is traced and cut in two, and then runs as it is."""
    compiled = module.compile_fx

    def compile_fx(graph, inputs, *arguments, **options):
        from torch._dynamo.backends.debugging import aot_eager

        if any(getattr(given, "is_cuda", False) for given in inputs):
            return aot_eager(graph, inputs)
        return compiled(graph, inputs, *arguments, **options)

    vars(module)["compile_fx"] = compile_fx


def change_gpus(module: ModuleType) -> None:
    """The driver's folder lists the pretended GPUs."""
    from tools.pretend import build, cards

    asked = cards.asked()
    count = asked[1] if asked else 0
    folder = build.FOLDER / f"driver-{count}"
    for number in range(count):
        (folder / f"0000:{number:02x}:00.0").mkdir(parents=True, exist_ok=True)
    vars(module)["DRIVER"] = Path(folder)


def change_helpers(module: ModuleType) -> None:
    """The finder that the package has put first answers for some of the modules changed here."""
    sys.meta_path.sort(key=lambda finder: type(finder).__name__ != "AfterImport")
