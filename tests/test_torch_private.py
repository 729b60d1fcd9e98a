"""PyTorch's private names: each is still there, and none is used anywhere but in two modules."""

import ast
import contextlib
import ctypes

import torch

from tests.small import ROOT
from tight_fit import torch_private
from tight_fit.layouts import torch_private_ranks

# {name: the release in which it was first found missing}; empty: none has broken one since 2.11.
BROKEN: dict[str, str] = {}


def test_every_name_is_there():
    moved = [
        f"{module.__name__}.{name}"
        for module in (torch_private, torch_private_ranks)
        for name in module.__all__
        if getattr(module, name, None) is None
    ]
    assert not moved, f"PyTorch {torch.__version__} moved these: mend them, and note it in BROKEN."


def test_what_is_patched_and_asked_is_there():
    from torch.distributed.tensor.experimental._context_parallel import _attention

    fsdp, gather = torch_private_ranks.fsdp_param_module(), torch_private_ranks.RING_GATHER
    wanted = [torch_private.TRUNCATED_NORMAL, torch_private.MAKE_SUBCLASS]
    wanted += [(torch.amp.GradScaler, torch_private.SKIPS_STEPS), (fsdp, "_chunk_with_empty")]
    wanted += [(_attention, f"_templated_ring_attention{which}") for which in ("", "_backward")]
    functions = ("_maybe_wrap_tensor", gather, "permute_tensor", "wait_tensor")
    wanted += [(_attention.ft_c, name) for name in functions]
    for module, name in wanted:
        assert hasattr(module, name), f"PyTorch {torch.__version__} has no {module}.{name}."
    assert isinstance(_attention._cp_options.enable_load_balance, bool)
    assert isinstance(torch_private.fake_store(), torch.distributed.Store)
    torch_private_ranks.forget_process_groups()


def test_two_views_share_a_storage_key_and_two_tensors_do_not():
    whole = torch.zeros(4)
    keys = [torch_private.storage_key(t.untyped_storage()) for t in (whole, whole[1:], whole + 1)]
    assert keys[0] == keys[1] != keys[2]


class Driver:
    """What PyTorch calls of the CUDA driver, without a GPU. Every call succeeds."""

    def cuModuleLoadData(self, module, image):
        self.image = image
        return 0

    def cuModuleGetFunction(self, function, module, name):
        self.name = name
        return 0

    def cuLaunchKernel(self, function, *settings):
        *self.sizes, self.shared_memory, self.stream, pointers, _ = settings
        self.numbers = [ctypes.c_int.from_address(pointer).value for pointer in pointers]
        return 0


def test_a_kernel_is_loaded_and_launched_through_pytorch(monkeypatch):
    driver = Driver()
    stream = type("Stream", (contextlib.nullcontext,), {"_as_parameter_": 7})()
    monkeypatch.setattr(torch.cuda._utils, "_get_gpu_runtime_library", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    kernel = torch_private.load_cuda_kernel(b"\x7fELF\0code", "kernel_half2")
    assert (driver.image, driver.name) == (b"\x7fELF\0code", b"kernel_half2")
    kernel((3, 1, 1), (256, 1, 1), [5, -2])
    assert driver.sizes == [3, 1, 1, 256, 1, 1]
    assert (driver.shared_memory, driver.stream, driver.numbers) == (0, 7, [5, -2])


def test_nobody_else_imports_private_modules_of_torch():
    for path in [p for n in ("tight_fit", "helpers", "by_hand") for p in (ROOT / n).rglob("*.py")]:
        if path.stem in ("torch_private", "torch_private_ranks"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            wanted = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
            private = [name for name in wanted if name.startswith("torch.") and "._" in name]
            assert not private, f"{path} imports {private[0]}: take it from torch_private*.py"
