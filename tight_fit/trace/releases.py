"""What older releases of PyTorch do differently, as far as it is known and changes memory.

before 2.1  foreach Adam and AdamW hold two lists of temporaries as large as the parameters, where
            later releases hold one (https://github.com/pytorch/pytorch/pull/104898, July 2023)
before 2.0  optimizers update one parameter after the other unless told otherwise; `zero_grad` fills
            with zeros unless told otherwise; cuBLAS's workspaces are not allocated by PyTorch's
            allocator, so no figure of it counts them
            (https://github.com/pytorch/pytorch/pull/85447)

Anything else is that of the installed PyTorch: its operators, its attention kernels, what its other
optimizers hold, and its allocator, whose rules for sizes have been the same since 1.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import nn

from tight_fit.checks import shown
from tight_fit.torch_private import ADAM_FOREACH, FOREACH_ADDCDIV

OLDEST = (1, 8)


def parse(version: str | None) -> tuple[int, int]:
    """(major, minor) of a release such as "2.0" or "2.1.0+cu121"; None is the installed PyTorch.

    Raises ValueError for something else, for a release before 1.8, and for one that is newer than
    the installed PyTorch.
    """
    installed = _numbers(torch.__version__)
    if version is None:
        return installed
    release = _numbers(version) if isinstance(version, str) else (0, 0)
    if not OLDEST <= release <= installed:
        raise ValueError(
            f"torch_version={shown(version)} is not known: use a release from "
            f'{".".join(map(str, OLDEST))} to {".".join(map(str, installed))}, such as "2.0".'
        )
    return release


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@contextmanager
def as_in(release: tuple[int, int]) -> Iterator[None]:
    """Inside, optimizers and `zero_grad` behave as in that release."""
    with ExitStack() as patches:
        if release < (2, 1):
            patches.enter_context(_two_lists())
        if release < (2, 0):
            for owner in (torch.optim.Optimizer, nn.Module):
                patches.enter_context(patch.object(owner, "zero_grad", _filling(owner)))
        yield


def _filling(owner: type):
    """`zero_grad` that fills with zeros by default."""
    original = owner.zero_grad  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = False) -> None:
        original(self, set_to_none=set_to_none)

    return zero_grad


@contextmanager
def _two_lists() -> Iterator[None]:
    """Adam's denominators are a second list, beside the roots that they are computed from."""
    owner, name = ADAM_FOREACH
    update, divide = getattr(owner, name), getattr(torch, FOREACH_ADDCDIV)

    def divide_by_a_copy(parameters, first, roots, *args, **kwargs):
        denominators = [torch.empty_like(root) for root in roots]
        return divide(parameters, first, denominators, *args, **kwargs)

    def update_as_before(*args, **kwargs):
        with patch.object(torch, FOREACH_ADDCDIV, divide_by_a_copy):
            return update(*args, **kwargs)

    with patch.object(owner, name, update_as_before):
        yield
