"""What a planned program saves and loads again: its shapes are kept here, in place of its values.

A file that it saves holds a mark in place of tensors without values. Wherever the program then
moves, copies or sends that file, what it loads from it is what it saved, made anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
from transformers import PreTrainedModel

from tight_fit.torch_private import FakeTensor, disable_current_modes, tree_map

MARK = b"saved by a planned program: "
LONGEST = len(MARK) + 20  # bytes of a mark with its number


@dataclass(frozen=True)
class WithoutValues:
    """A tensor without its values; `grad` where it is an `nn.Parameter`, whether it has one."""

    size: torch.Size
    dtype: torch.dtype
    on_gpu: bool
    grad: bool | None


class Saved:
    """Everything that a program has saved, by the number in the mark.

    on_disk  whether files are written; without, paths are remembered, and nothing is written
    """

    def __init__(self, on_disk: bool):
        self.on_disk = on_disk
        self._held: list[Any] = []
        self._marks: dict[str, bytes] = {}

    def write(self, file: Any, held: Any) -> None:
        """Keep what is saved, without its values, and write its mark to a file, a path or open."""
        self._held.append(tree_map(_without_values, held))
        content = MARK + b"%d" % (len(self._held) - 1)
        if hasattr(file, "write"):
            file.write(content)
        elif self.on_disk:
            with open(os.fspath(file), "wb") as opened:
                opened.write(content)
        else:
            self._marks[os.path.realpath(file)] = content

    def mark_in(self, file: Any) -> bytes | None:
        """The mark that a file holds, None where it holds something else."""
        if hasattr(file, "read"):
            place = file.tell()
            content = file.read(LONGEST)
            if not content.startswith(MARK):
                file.seek(place)
        elif os.path.realpath(file) in self._marks:
            content = self._marks[os.path.realpath(file)]
        else:
            with open(os.fspath(file), "rb") as opened:
                content = opened.read(LONGEST)
        return content if content.startswith(MARK) else None

    def made_anew(self, content: bytes, on_gpu: bool | None) -> Any:
        """What was saved with this mark.

        on_gpu  where its tensors shall be; None for where they were
        """
        held = self._held[int(content[len(MARK) :])]
        return tree_map(lambda leaf: _with_memory(leaf, on_gpu), held)


def _without_values(leaf: Any) -> Any:
    if isinstance(leaf, FakeTensor):
        grad = leaf.requires_grad if isinstance(leaf, torch.nn.Parameter) else None
        return WithoutValues(leaf.shape, leaf.dtype, leaf.is_cuda, grad)
    if isinstance(leaf, torch.Tensor):
        with disable_current_modes():
            return leaf.detach().clone()
    return leaf


def _with_memory(leaf: Any, on_gpu: bool | None) -> Any:
    if isinstance(leaf, WithoutValues):
        made = torch.empty(leaf.size, dtype=leaf.dtype)
        if leaf.on_gpu if on_gpu is None else on_gpu:
            made = made.cuda()
        return made if leaf.grad is None else torch.nn.Parameter(made, leaf.grad)
    if isinstance(leaf, torch.Tensor):
        with disable_current_modes():
            made = leaf.clone()
        return made.cuda() if on_gpu else made
    return leaf


@contextmanager
def kept(on_gpu: bool, on_disk: bool) -> Iterator[None]:
    """Inside, what the program saves can be loaded again, and files hold no weights.

    on_gpu   whether the program is told of a GPU
    on_disk  whether files are written
    """
    saved, load, load_file = Saved(on_disk), torch.load, safetensors.torch.load_file

    def save(held, file, *args, **kwargs):
        saved.write(file, held)

    def save_model(model, filename, *args, **kwargs):
        saved.write(filename, model.state_dict())

    def loaded(file, map_location=None, *args, **kwargs):
        mark = saved.mark_in(file)
        if mark is None:
            return load(file, map_location, *args, **kwargs)
        wanted = None if map_location is None else on_gpu and "cuda" in str(map_location)
        return saved.made_anew(mark, wanted)

    def loaded_file(filename, device="cpu", *args, **kwargs):
        mark = saved.mark_in(filename)
        if mark is None:
            return load_file(filename, device, *args, **kwargs)
        return saved.made_anew(mark, on_gpu and str(device) != "cpu")

    def save_pretrained(model, save_directory, *args, **kwargs):
        if on_disk:
            model.config.save_pretrained(save_directory)

    with ExitStack() as patches:
        for owner, name, value in (
            (torch, "save", save),
            (torch, "load", loaded),
            (safetensors.torch, "save_file", save),
            (safetensors.torch, "save_model", save_model),
            (safetensors.torch, "load_file", loaded_file),
            (PreTrainedModel, "save_pretrained", save_pretrained),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield
