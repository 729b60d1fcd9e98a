"""The data loaders of a program: real, in this process, and never at their end while it trains.

The loader from which the batches of the training steps come can be asked for one batch more: of
the longest examples of its data set, which is the largest batch that training may meet.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

from tight_fit.torch_private import tree_leaves

SAMPLE = 64  # examples that are looked at first; where all have one size, no other is read
SECONDS = 20.0  # for which the sizes of examples are read
# Arguments of a DataLoader that ask for processes and pinned memory, and what stands for them.
ALONE = {
    "num_workers": 0,
    "pin_memory": False,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "multiprocessing_context": None,
}


class Loaders:
    """Knows which loader feeds the training.

    steps    number of steps that have been taken, told by `steps.Watch`
    drawn    the last loader that gave a batch
    seen     {shape of a batch: times drawn} of the loader that feeds the training
    evaluated is the loader that has given batches since then
    over     whether training has been planned; then its loader ends, and tells `again` of it
    divide   how many times smaller its batches are made (a change that is tried)
    """

    def __init__(self, divide: int = 1):
        self.steps = 0
        self.divide, self.divided = divide, False
        self.drawn: DataLoader | None = None
        self.lines: dict[int, str] = {}  # id of a loader -> the line that made it
        self.seen: dict[tuple[int, ...], int] = {}
        self.longest_wanted = False
        self.longest: Longest | None = None
        self.given = 0  # longest batches that have been given
        self.over = False
        self.evaluated: DataLoader | None = None
        self.again: Callable[[], None] = lambda: None  # what is called when it goes on

    def divide_by(self, parts: int) -> None:
        """Let loaders that are made from now on have batches so many times smaller."""
        self.divide = parts

    def most_seen(self) -> tuple[int, ...] | None:
        """The shape of the largest batch that fed the training; None without a loader."""
        return max(self.seen, key=math.prod, default=None)

    def longest_of(self) -> Longest | None:
        """The longest batch of the loader that feeds the training, None where nothing is known."""
        if self.longest is None and self.drawn is not None:
            self.longest = find_longest(self.drawn)
        return self.longest


class Longest:
    """The longest examples of a loader's data set, as one batch.

    shape    of the batch, as `shape_of`
    read     examples whose sizes were read
    of       examples in the data set
    """

    def __init__(self, batch: Any, read: int, of: int):
        self.batch, self.read, self.of = batch, read, of
        self.shape = shape_of(batch) or ()


def find_longest(loader: DataLoader) -> Longest | None:
    """The batch of a loader's longest examples; None where examples cannot be read by number.

    An example's size is the number of elements in it. Where `SAMPLE` examples from all over the
    data set have the same size, all are taken to have it.
    """
    data, count = loader.dataset, _batch_size(loader)
    try:
        total = len(data)  # type: ignore[arg-type]
        if not count or not total:
            return None
        some = range(0, total, max(1, total // SAMPLE))
        sizes = {index: elements(data[index]) for index in some}
        if len(set(sizes.values())) > 1:
            began = time.monotonic()
            for index in range(total):
                if index not in sizes:
                    sizes[index] = elements(data[index])
                if time.monotonic() - began > SECONDS:
                    break
        else:
            return Longest(None, len(sizes), total)
        largest = sorted(sizes, key=lambda index: -sizes[index])[:count]
        if len(largest) < count:
            return None
        examples = [data[index] for index in largest]
        batch = loader.collate_fn(examples) if loader.collate_fn else examples
        return Longest(batch, len(sizes), total)
    except (TypeError, KeyError, IndexError, NotImplementedError):
        return None


def _batch_size(loader: DataLoader) -> int | None:
    if loader.batch_size is not None:
        return loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None)


def elements(example: Any) -> int:
    """How many elements an example holds: of tensors, arrays, lists, texts and images."""
    if isinstance(example, torch.Tensor):
        return example.numel()
    if isinstance(example, dict):
        return sum(elements(value) for value in example.values())
    if isinstance(example, (str, bytes)):
        return len(example)
    if isinstance(example, Sequence):
        if example and isinstance(example[0], (int, float)):
            return len(example)
        return sum(elements(value) for value in example)
    size = getattr(example, "size", 1)  # of an array, or (width, height) of an image
    if isinstance(size, tuple):
        return math.prod(size)
    return size if isinstance(size, int) else 1


def shape_of(batch: Any) -> tuple[int, ...] | None:
    """The shape of the largest tensor of a batch, None where it has none."""
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(_plain(batch)) if hasattr(leaf, "shape")]
    return max(shapes, key=math.prod, default=None)


def _plain(batch: Any) -> Any:
    return dict(batch) if hasattr(batch, "keys") and not isinstance(batch, dict) else batch


class _Batches:
    """An iterator over a loader that begins anew where training would come to its end."""

    def __init__(self, loader: DataLoader, make: Any, loaders: Loaders):
        self.loader, self.make, self.loaders = loader, make, loaders
        self.inner = make(loader)
        self.began = loaders.steps

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        loaders = self.loaders
        feeds = loaders.drawn is self.loader
        if loaders.over:
            if not feeds:
                loaders.evaluated = self.loader
                return next(self.inner)
            loaders.again()
            raise StopIteration
        longest = loaders.longest
        if loaders.longest_wanted and feeds and longest is not None:
            loaders.given += 1
            return longest.batch
        try:
            batch = next(self.inner)
        except StopIteration:
            if loaders.steps == self.began:
                raise
            self.inner = self.make(self.loader)
            batch = next(self.inner)
        loaders.drawn = self.loader
        shape = shape_of(batch)
        if shape is not None:
            if not feeds:
                loaders.seen.clear()
            loaders.seen[shape] = loaders.seen.get(shape, 0) + 1
        return batch


@contextmanager
def watched(loaders: Loaders, line: Any) -> Iterator[None]:
    """Inside, data loaders have no workers, and `loaders` follows them; `line()` says where."""
    make, each = DataLoader.__init__, DataLoader.__iter__
    signature = inspect.signature(make)

    def make_alone(loader, *args, **kwargs):
        given = signature.bind(loader, *args, **kwargs)
        for name, value in ALONE.items():
            if name in given.arguments:
                given.arguments[name] = value
        size = given.arguments.get("batch_size", 1)
        if loaders.divide > 1 and isinstance(size, int) and size % loaders.divide == 0:
            given.arguments["batch_size"] = size // loaders.divide
            loaders.divided = True
        make(*given.args, **given.kwargs)
        loaders.lines[id(loader)] = line()

    def each_batch(loader):
        loader.num_workers, loader.pin_memory = 0, False  # one of an earlier cell may have them
        return _Batches(loader, each, loaders)

    with (
        patch.object(DataLoader, "__init__", make_alone),
        patch.object(DataLoader, "__iter__", each_batch),
    ):
        yield
