"""Ranks without values that stay from one plan to the next: making and settling one takes most of
the time of a plan, and steps that differ in micro-batches and recomputation have the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from tight_fit.layouts.fake_rank import fake_rank, fake_ranks
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.rank import AXES, ModelRank, grid_of
from tight_fit.layouts.torch_private_ranks import forget_process_groups
from tight_fit.layouts.wrapping import enable_recomputation, set_resharding
from tight_fit.models.step import ModelStep
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues, NeverSkipScaler

VARIED = ("config", "accumulation", "checkpointing")  # fields of steps that take the same rank
# Strategies of which one rank can take the others' steps: they keep weights gathered, or do not.
# What the others keep depends on the number of micro-batches.
ALIKE = ("fsdp", "zero2")


class OpenRank(NamedTuple):
    """A rank, what a batch depends on, the number of parameters, and whether it is settled."""

    rank: ModelRank
    shape: Any
    parameters: int
    settled: bool = False


class OpenRanks:
    """The ranks that are open, all over one process group; a context, which closes them."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._over: tuple[int, int] | None = None
        self._ranks: dict[tuple, OpenRank] = {}
        self._grids: dict[tuple, dict[str, DeviceMesh]] = {}  # by the layout's numbers of ranks
        self._latest: dict[str, DeviceMesh] = {}  # that of the rank that was taken last
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # that of all their tensors

    def __enter__(self) -> OpenRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __bool__(self) -> bool:
        """Whether there is a process group."""
        return self._over is not None

    def close(self) -> None:
        """Give up the ranks and their process group."""
        self._ranks.clear()
        self._grids.clear()
        self._over, self._latest = None, {}
        self._open.close()

    def over(self, ranks: int, number: int) -> None:
        """Be one rank of many; what is open over another process group is closed."""
        if self._over != (ranks, number):
            self.close()
            self._open.enter_context(fake_ranks(ranks, number))
            self._over = ranks, number

    def take(
        self,
        model_step: ModelStep,
        layout: Layout,
        kernels: Callable[[], CudaKernels],
        selective: bool,
        reduce: str,
        whole: bool,
    ) -> OpenRank:
        """A rank for a step, which is this class's again with `keep`: an open one, or a new one.

        whole  whether all layers run
        """
        found = self._ranks.pop(_key(model_step, layout, reduce, whole), None)
        if found is None:
            mesh = self._grid(layout)
            with self.mode, FakeValues(), kernels():
                made = fake_rank(ModelRank, model_step, layout, mesh, kernels, selective, reduce)
            made[0].scaler = NeverSkipScaler("cpu", enabled=model_step.precision == "fp16")
            return OpenRank(*made)
        self._use(found.rank.mesh)
        model: Any = found.rank.module.model
        if found.rank.layout != layout:
            set_resharding(model, layout)
        found.rank.take(model_step, layout)
        if model_step.checkpointing:
            enable_recomputation(model, selective, kernels)
        else:
            model.gradient_checkpointing_disable()
        return found

    def _grid(self, layout: Layout) -> dict[str, DeviceMesh]:
        """The grid of a layout, one for all ranks that have the same."""
        sizes = *(getattr(layout, name) for name in AXES), layout.expert
        if sizes not in self._grids:  # its tensors have values: not in FakeTensorMode
            self._grids[sizes] = grid_of(layout)
        self._use(self._grids[sizes])
        return self._grids[sizes]

    def _use(self, grid: dict[str, DeviceMesh]) -> None:
        """DTensor's caches hold process groups, and take those of another grid for this one's."""
        if grid is not self._latest:
            forget_process_groups()
            self._latest = grid

    def keep(self, taken: OpenRank, reduce: str, whole: bool) -> None:
        """Take a rank back whose step has been traced, if another step can have it."""
        step, layout = taken.rank.model_step, taken.rank.layout
        model: Any = taken.rank.module.model
        varies = getattr(model, "supports_gradient_checkpointing", False)
        if varies and layout.strategy in ALIKE and not (step.compile or step.kbit):
            self._ranks[_key(step, layout, reduce, whole)] = taken._replace(settled=True)


def _key(step: ModelStep, layout: Layout, reduce: str, whole: bool) -> tuple:
    values = [getattr(step, own.name) for own in fields(step) if own.name not in VARIED]
    if layout.strategy in ALIKE and layout.expert == 1:  # experts are groups inside of layers
        layout = replace(layout, strategy=ALIKE[0])
    return layout, reduce, whole, id(step.config), *values
