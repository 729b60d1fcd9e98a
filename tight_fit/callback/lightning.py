"""`LightningPlanCallback`: what a step of Lightning's Trainer will need, said before the first one.

    trainer = lightning.Trainer(callbacks=[LightningPlanCallback()])

The module and its optimizer are copied without values, and its step (`training_step`, backward,
clipping, update, in the order of Lightning's loop) is planned on the longest batch that the data
set can give. Where it will not fit, smaller batches are planned. After the training, the plan
stands beside what the GPU reserved.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tight_fit.callback.shared import (
    REMEDIES,
    CopiedStep,
    Teller,
    check_weights,
    longest_batch,
    random_numbers_kept,
)
from tight_fit.gpus import GPU
from tight_fit.units import size

NAMES = ("lightning.pytorch", "pytorch_lightning")  # the same library has two names
AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
PLAIN = {"32-true", "16-true", "bf16-true"}


def _base() -> type:
    """Lightning's Callback, of the name that is imported; without Lightning any class will do."""
    for name in sorted(NAMES, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            return import_module(name).Callback
    return object


if TYPE_CHECKING:
    Base = object
else:
    Base = _base()


class LightningPlanCallback(Teller, Base):
    """Plan the step of Lightning's Trainer before its first one, and compare at the end.

    >>> from tight_fit import LightningPlanCallback
    >>> LightningPlanCallback("2080 ti").gpu.name  # goes into the Trainer's `callbacks`
    'RTX 2080 Ti'

    gpu    the GPU to plan for, a name, a size ("16GB") or a `GPU`; None takes the one that is here
    say    what a line is given to; `print` by default
    facts  what was planned and measured, as in `PlanCallback`, in bytes and seconds

    Planned is one process with automatic optimization, uncompiled. The copy of the module logs
    nothing. Raises ValueError for an unknown GPU. What cannot be planned is said in one line, and
    training goes on.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan the step, and say what it needs."""
        if not trainer.is_global_zero:
            return

        def step() -> _LightningStep:
            _check(trainer, pl_module)
            return _LightningStep(trainer, pl_module, longest_batch(trainer.train_dataloader))

        with random_numbers_kept():
            self.begin(step, _advice)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say how far the plan was from what the GPU reserved."""
        self.end()


class _Quiet:
    """The Trainer as the copy of a module sees it: it has no logger that keeps anything."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        loggers = import_module(f"{_home(trainer)}.loggers.logger")
        self.logger = loggers.DummyLogger()
        self.loggers = [self.logger]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_trainer"], name)

    def __deepcopy__(self, memo: Any) -> _Quiet:
        return self


class _LightningStep(CopiedStep):
    def __init__(self, trainer: Any, module: Any, batch: Any):
        batch = module.on_before_batch_transfer(batch, 0)
        super().__init__(module, trainer.optimizers[0], batch, trainer.accumulate_grad_batches)
        self.trainer = trainer
        self.quiet = _Quiet(trainer)

    def shared(self) -> list[Any]:
        """The Trainer, which holds much more than a step."""
        return [self.trainer]

    def prepare(self, model: Any, checkpointing: bool) -> None:
        """Let the copy be on the GPU, and log nothing."""
        for module in model.modules():
            if "_device" in vars(module):  # of a LightningModule, or a metric
                module._device = torch.device("cuda", 0)
            if "_trainer" in vars(module):
                module._trainer = self.quiet
                module.log = module.log_dict = lambda *args, **options: None

    def plan(self, *args: Any, **options: Any) -> Any:
        """As of any step. Raises NotImplementedError for whatever a copy cannot do."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return super().plan(*args, **options)
        except NotImplementedError:
            raise
        except Exception as error:  # a module's own code runs, and training must go on
            words = (str(error).splitlines() or [""])[0]
            raise NotImplementedError(
                f"without values its training_step ends in {type(error).__name__}: {words} "
                "`tight-fit script` plans the program."
            ) from error

    def of(self, model: Any, optimizer: Any, batch: Any, parts: int) -> Callable[[], object]:
        """The step in the order of Lightning's loop, which clears gradients before backward."""
        precision = self.trainer.precision_plugin
        dtype = AUTOCAST.get(self.trainer.precision)
        scaler = torch.amp.GradScaler("cuda") if dtype is torch.float16 else None
        inside: Callable[[], Any] = precision.train_step_context
        if dtype is not None:  # Lightning's own asks for autocast on the device that trains

            def inside() -> Any:
                return torch.autocast("cuda", dtype, cache_enabled=False)

        def loss_of(number: int) -> torch.Tensor | None:
            moved = model.on_after_batch_transfer(precision.convert_input(batch), 0)
            with inside():
                out = model.training_step(*(moved, number)[: _arguments(model)])
            loss = out["loss"] if isinstance(out, Mapping) else out
            if number == 0:
                optimizer.zero_grad()
            return None if loss is None else loss / parts

        def step() -> None:
            for number in range(parts):
                loss = loss_of(number)
                if loss is None:
                    raise NotImplementedError("its training_step gives no loss.")
                (scaler.scale(loss) if scaler else loss).backward()
                del loss
            itself = getattr(optimizer, "_step_supports_amp_scaling", False)
            if scaler and not itself:
                scaler.unscale_(optimizer)
            self._clip(optimizer)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()

        return step

    def _clip(self, optimizer: Any) -> None:
        value = self.trainer.gradient_clip_val
        if value:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            how = self.trainer.gradient_clip_algorithm or "norm"
            by_value = getattr(how, "value", how) == "value"
            clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
            clip(weights, value)


def _arguments(module: Any) -> int:
    """How many of (batch, its number) training_step takes."""
    code = module.training_step.__code__
    return code.co_argcount - 1


def _home(trainer: Any) -> str:
    """The name under which the Trainer's library is imported."""
    return next(
        name
        for name in NAMES
        if any(kind.__module__.startswith(f"{name}.") for kind in type(trainer).__mro__)
    )


def _check(trainer: Any, module: Any) -> None:
    """Raises NotImplementedError for what is not one process's plain step."""
    if trainer.world_size > 1:
        raise NotImplementedError(
            "several processes train it; `tight-fit script PROGRAM --ranks N` plans one of them."
        )
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        raise NotImplementedError(
            "its optimization is manual; `tight-fit script` plans the program."
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise NotImplementedError("it is compiled; `tight-fit script` plans the program.")
    if trainer.precision not in PLAIN | set(AUTOCAST):
        raise NotImplementedError(f"precision {trainer.precision!r} is not planned.")
    if not isinstance(trainer.train_dataloader, DataLoader):
        raise NotImplementedError("its batches come from several data loaders, or from none.")
    check_weights(module)


def _advice(step: Any, gpu: GPU) -> str:
    """The smaller batches with which the step fits, each planned."""
    count = step.trainer.train_dataloader.batch_size or 0
    for halvings in range(1, REMEDIES + 1):
        if not count or count % (1 << halvings):
            break
        fit = step.plan(gpu, halvings).fits(gpu)
        if fit:
            return (
                f"it fits with batch_size={count >> halvings} in the DataLoader and "
                f"accumulate_grad_batches={step.accumulation << halvings} ({size(fit.need)})."
            )
    return "no batch of a half, a quarter or an eighth of the size makes it fit."
