"""Imports that transformers makes for all models and no plan needs, put off until they are used.

`put_off` is for the command's own process, which ends after its answer. A module of `LATER` is
then imported without being run: it has the names of the table, which stand for the real ones, and
anything else that is taken from it runs it, in place. So whoever holds the module has the real one.
A name that the installed release does not mention is taken from the real module at once.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from tight_fit.command import unread_models
from tight_fit.command.wrapper import importing

LATER: dict[str, tuple[str, ...]] = {
    "scipy.optimize": ("linear_sum_assignment",),  # the losses of detection models
    # torch.compile; what transformers decorates, and what optimizers call, does nothing before
    "torch._dynamo": ("allow_in_graph", "assume_constant_result", "disable", "graph_break"),
    "torch._dynamo.source": ("ConstantSource", "RandomValueSource"),  # names of constants
    # models over many ranks; no tensor is a DTensor before its module is run
    "torch.distributed.tensor": ("DTensor",),
    "torch.distributed._composable": (),
    "torch.distributed._composable.fsdp": ("fully_shard",),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy"),
    "transformers.distributed.checkpoint": (
        "_get_resolved_distributed_checkpoint_files",
        "_load_model_checkpoint_distributed",
        "_save_model_checkpoint_distributed",
        "consolidate_distributed_checkpoint",
        "get_distributed_checkpoint_dir",
    ),
    "transformers.distributed.expert_parallel": ("apply_expert_parallelism",),
    "transformers.distributed.sharding_utils": (
        "DtensorShardOperation",
        "_dtensor_from_local_like",
        "_tied_params_are_equal",
    ),
    "transformers.distributed.tensor_parallel": (
        "apply_tensor_parallelism",
        "gather_state_dict_for_save",
        "get_kv_heads_per_rank",
        "verify_tp_plan",
    ),
    # files of weights, and models that are divided or offloaded when they are loaded
    "accelerate": ("PartialState", "dispatch_model"),
    "accelerate.hooks": ("AlignDevicesHook", "add_hook_to_module"),
    "accelerate.utils": (
        "extract_model_from_parallel",
        "get_balanced_memory",
        "infer_auto_device_map",
        "reduce",
    ),
    "transformers.integrations.accelerate": (
        "_get_device_map",
        "accelerate_disk_offload",
        "accelerate_dispatch",
        "check_and_set_device_map",
        "expand_device_map",
        "get_device",
        "load_offloaded_parameter",
        "offload_weight",
    ),
    "transformers.integrations.deepspeed": (
        "_load_state_dict_into_zero3_model",
        "deepspeed_config",
        "is_deepspeed_zero3_enabled",
        "prevent_arange_dtype_change",
    ),
}
# What a function of a module answers while the module was not run, as nothing can be set in it.
BEFORE = {"graph_break": None, "is_deepspeed_zero3_enabled": False, "deepspeed_config": None}
# Modules that need nothing of their package, which FakeTensorMode and masks use.
ALONE = ("torch._dynamo.config", "torch._dynamo._trace_wrapped_higher_order_op")

_wanted: set[str] = set()  # packages of which some module was run: others no longer stand in
_noted: list[tuple[str, Any]] = []  # (decorator, function) that Dynamo is told of when it is run


class _Deferred(ModuleType):
    """A module that is imported and was not run."""

    def __getattr__(self, name: str) -> Any:
        own = self.__name__
        if name in LATER[own] and _top(own) not in _wanted and name in _words(self.__file__):
            return _stand_in(own, name)
        if name.startswith("__") and name != "__all__":  # who looks through all modules asks
            raise AttributeError(name)
        if f"{own}.{name}" in ALONE:
            return import_module(f"{own}.{name}")
        _run(self)
        return getattr(self, name)


class _Loader:
    """Makes a `_Deferred`; `real` is what runs it."""

    def __init__(self, real: Any):
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Read(_Loader):
    """Runs the module that reads the files of all models, and puts that off."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        unread_models.put_off(module)


class _There(_Loader):
    """Gives a module that its package imported while it was looked for, which Python would make
    anew from the specification that the module has."""

    def __init__(self, module: ModuleType):
        super().__init__(module.__spec__)
        self.module = module
        module.__spec__ = ModuleSpec(module.__name__, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.real


class _Finder:
    """Finds the modules of `LATER`, and runs the package of any other module of one first."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in LATER and _top(name) not in _wanted:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None and spec.origin:
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        if name == "transformers.utils.import_utils":
            spec = PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = _Read(spec.loader)  # type: ignore[assignment]
            return spec
        package = sys.modules.get(name.rpartition(".")[0])
        if isinstance(package, _Deferred) and name not in ALONE:
            _run(package)
            if name in sys.modules:
                return _There(sys.modules[name]).module.__spec__
        return None


class _Later:
    """Stands for a function or a class of a module that was not run."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def _real(self) -> Any:
        module = import_module(self._module)
        if isinstance(module, _Deferred):
            _run(module)
        return getattr(module, self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name == "ConstantSource" and _waits(self._module):
            return _Made(self._module, self._name, args)
        if self._name in BEFORE and _waits(self._module):
            return BEFORE[self._name]
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __instancecheck__(self, value: Any) -> bool:
        return not _waits(self._module) and isinstance(value, self._real())

    def __subclasscheck__(self, kind: type) -> bool:
        return not _waits(self._module) and issubclass(kind, self._real())

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (self._real(),)


class _Made(_Later):
    """What such a class makes when it is called, made when it is looked at."""

    def __init__(self, module: str, name: str, args: tuple):
        super().__init__(module, name)
        self._made: Any = None
        self._args = args

    def _real(self) -> Any:
        self._made = self._made or super()._real()(*self._args)
        return self._made


def put_off() -> None:
    """From here on, the imports of `LATER` are put off in this process."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _waits(name: str) -> bool:
    return isinstance(sys.modules.get(name), _Deferred)


@cache
def _words(file: str | None) -> frozenset[str]:
    with open(file or "", encoding="utf8") as source:
        return frozenset(re.findall(r"\w+", source.read()))


def _run(module: ModuleType) -> None:
    """Run a module, its package first, as their import would have done."""
    name = module.__name__
    _wanted.add(_top(name))
    package = sys.modules.get(name.rpartition(".")[0])
    if isinstance(package, _Deferred):
        _run(package)
    if not isinstance(module, _Deferred):
        return  # its package has taken something from it
    spec: Any = module.__spec__
    module.__class__ = ModuleType  # type: ignore[assignment]
    module.__loader__ = spec.loader = spec.loader.real
    with importing() if gc.isenabled() else nullcontext():
        spec.loader.exec_module(module)
    if name == "torch._dynamo":
        for decorator, function in _noted:
            getattr(module, decorator)(function)


@cache
def _stand_in(module: str, name: str) -> Any:
    if name == "disable":
        return _disable
    if name in ("allow_in_graph", "assume_constant_result"):
        return partial(_note, name)
    return _Later(module, name)


def _note(decorator: str, function: Any) -> Any:
    _noted.append((decorator, function))
    return function


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    """The function itself until Dynamo is run, and then what Dynamo does not compile."""
    if function is None:
        return partial(_disable, recursive=recursive, **options)
    made: list[Callable] = []
    real = partial(_Later("torch._dynamo", "disable"), function, recursive, **options)
    if not inspect.isfunction(function):
        return real()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _waits("torch._dynamo"):
            return function(*args, **kwargs)
        if not made:
            made.append(real())
        return made[0](*args, **kwargs)

    return call
