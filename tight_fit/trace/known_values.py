"""Which tensors without memory have values, and what is answered where there are none.

What follows from the data, from constants and from random numbers alone has its real value: data
sets, tokenizers, collators and masks work as they do in a real run. What follows from parameters
has a shape and no value. Where such a value is asked for, these rules answer:

- a number (`.item()`, a comparison, a list or a NumPy array of them) is 1, which is true;
- nothing is infinite or not a number, and nothing differs from itself;
- the positions of the largest of such values (`topk`), by which routers send tokens to experts, are
  spread evenly: each expert of a layer gets as many tokens as any other;
- a shape that depends on such values cannot be known: the program is refused, with the line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tight_fit.torch_private import (
    DEVICE_OF,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    PlainDispatchMode,
    disable_current_modes,
    has_wrapper,
    is_view,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
    written_arguments,
)
from tight_fit.trace.gpu_calls import Places

aten = torch.ops.aten
LARGEST = 2**24  # elements of a tensor whose values are followed
LARGEST_MADE = 2**16  # elements of one that is made on the GPU out of nothing
# The second comes where autograd is off altogether (`torch.inference_mode`).
ITEM = {aten._local_scalar_dense.default, aten.item.default}
NEVER = {aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default}
NAME = "known_values"  # the attribute of a tensor on the GPU that holds its values
TOPK = aten.topk.default
CTC = aten._ctc_loss.default, aten._ctc_loss.Tensor
AND = {aten.bitwise_and.Tensor, aten.logical_and.default, aten.__and__.Tensor}
OR = {aten.bitwise_or.Tensor, aten.logical_or.default, aten.__or__.Tensor}
UNIQUE = (aten._unique.default, aten._unique2.default)
MASKED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class DependsOnValues(RuntimeError):
    """The shape of a result depends on values that follow from parameters."""


class _Known:
    """The values of a tensor on the GPU; `valid` is shared by all tensors of one storage.

    spread  whether they follow from positions that were taken to be spread evenly
    """

    __slots__ = ("spread", "tensor", "valid")

    def __init__(self, tensor: torch.Tensor, valid: list[bool], spread: bool = False):
        self.tensor, self.valid, self.spread = tensor, valid, spread


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with its values, None where it has none."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    known = getattr(tensor, NAME, None)
    return known.tensor if known is not None and known.valid[0] else None


def know(tensor: FakeTensor, values: torch.Tensor) -> None:
    """Say that a tensor has these values, of its shape."""
    setattr(tensor, NAME, _Known(values, [True]))


class KnownValues(PlainDispatchMode):
    """Runs on real tensors what has only such, and follows the values of data on the GPU.

    Enter it inside `FakeTensorMode` and `FakeValues`, and outside `Places`.

    places  where tensors are; those on the GPU have no memory
    line    gives the line of the program that runs, as text
    asked   {line of the program: how often a value was asked for that is not known}
    spread  {line of the program: how many shapes follow from positions that were spread evenly}
    """

    def __init__(self, places: Places, line: Callable[[], str] = str):
        super().__init__()
        self.places, self.line = places, line
        self.asked: Counter[str] = Counter()
        self.spread: Counter[str] = Counter()
        self._without = False  # whether what is made now has no values

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, dtype and strides without values, on the host."""
        return self.empty(tensor.shape, tensor.stride(), tensor.dtype)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without values."""
        self._without = True
        try:
            return torch.empty_strided(size, stride, dtype=dtype)
        finally:
            self._without = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if has_wrapper(types):
            return NotImplemented  # the tensors inside are dispatched again, one by one
        if function is DEVICE_OF:
            return function(*args, **kwargs)
        if self._without:
            return function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not fake and not self.places.all_on_gpu:
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if function in ITEM:
            return self._item(args[0])
        if function in MASKED and len(args) > 1:
            args = (args[0], _without_masks(args[1]), *args[2:])
        known = [values_of(tensor) for tensor in tensors]
        all_known = all(value is not None for value in known)
        try:
            result = function(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            return self._shaped_by_values(function, args, kwargs, all_known, error)
        if function is TOPK and not all_known:
            self._spread(args[0], result[1])
            return result
        self._follow(function, args, kwargs, tensors, all_known, result)
        self._write_to_real(function, args, kwargs, all_known)
        return result

    def _item(self, tensor: torch.Tensor) -> Any:
        values = values_of(tensor)
        if values is not None:
            with disable_current_modes():
                return values.item()
        self.asked[self.line()] += 1
        return 1.0 if tensor.is_floating_point() else 1

    def all_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the host with the values of one, or ones where they are not known."""
        values = values_of(tensor)
        if values is None:
            self.asked[self.line()] += 1
            values = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
            if tensor.numel() <= LARGEST:
                values = values.contiguous()
        return values.detach()

    def _follow(self, function, args, kwargs, tensors, all_known, result) -> None:
        """Give the results of an operation their values, where all of its arguments have them."""
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        most = LARGEST if tensors else LARGEST_MADE
        if not results and not written_arguments(function):
            return
        values = _never(function, args, result)
        if values is None and all_known:
            spread = any(map(_is_spread, tensors))
            if all(leaf.numel() <= most for leaf in results) and not (
                spread and any(leaf.is_floating_point() for leaf in results)
            ):
                values = _computed(function, args, kwargs)
        if values is None:
            for place, name in written_arguments(function):
                written = args[place] if place < len(args) else kwargs.get(name)
                for tensor in tree_leaves(written):
                    known = getattr(tensor, NAME, None)
                    if known is not None:
                        known.valid[0] = False
            return
        shared = [known.valid for tensor in tensors if (known := getattr(tensor, NAME, None))]
        real = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        for leaf, value in zip(results, real):
            if any(leaf is tensor for tensor in tensors):
                continue  # written in place, as its values were
            valid = shared[0] if shared and is_view(function) else [True]
            setattr(leaf, NAME, _Known(value, valid, any(map(_is_spread, tensors))))

    def _spread(self, given: torch.Tensor, positions: torch.Tensor) -> None:
        """Let the positions of the largest along the last dimension go round all that there are."""
        count, largest = given.shape[-1], positions.shape[-1]
        if positions.numel() <= LARGEST and tuple(positions.shape[:-1]) == given.shape[:-1]:
            with disable_current_modes():
                values = (torch.arange(positions.numel()) % count).view(-1, largest)
                values = values.sort(-1).values.view(positions.shape)
            setattr(positions, NAME, _Known(values, [True], spread=True))

    def _write_to_real(self, function, args, kwargs, all_known: bool) -> None:
        """Give real tensors that an operation with fake ones writes to what it writes: 1 where
        that is not known."""
        written = [
            args[place] if place < len(args) else kwargs.get(name)
            for place, name in written_arguments(function)
        ]
        real = [
            leaf
            for leaf in tree_leaves(written)
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        ]
        if not real or (all_known and _computed(function, args, kwargs) is not None):
            return
        with disable_current_modes(), torch.no_grad():
            for tensor in real:
                tensor.fill_(1)

    def _shaped_by_values(self, function, args, kwargs, all_known: bool, error: Exception) -> Any:
        """The result of an operation whose shape depends on values, which are known."""
        if function in CTC and (longest := _longest(args[3])) is not None:
            steps, batch, _ = args[0].shape if args[0].dim() == 3 else (args[0].shape[0], 1, 0)
            # Of the alignments the backward pass makes as many again, which no operation tells of.
            twice = args[0].new_empty(2, batch, steps, 2 * longest + 1)
            return args[0].new_empty(batch), twice[0]
        if function is aten._pack_padded_sequence.default:
            raise DependsOnValues(
                "pack_padded_sequence is not planned: let the recurrent layer read the padded "
                "batch, which as a rule takes more"
            ) from error
        mask = values_of(args[1]) if function is aten.masked_select.default else None
        if mask is not None:
            self._tell_of_spread(args[1:])
            with disable_current_modes():
                count = int(mask.expand(args[0].shape).sum())
            return args[0].new_empty(count)
        values = _computed(function, args, kwargs) if all_known else None
        if values is None:
            name = function.overloadpacket.__name__
            raise DependsOnValues(
                f"the shape of what {name} gives depends on values that follow from parameters, "
                "which a plan does not have"
            ) from error
        spread = self._tell_of_spread(args)
        # CUDA's kernel makes values and counts in buffers as long as its input, but for truth
        # values, and shortens them (ATen/native/cuda/UniqueCub.cu). A CPU counts first.
        buffer = function in UNIQUE and args[0].dtype != torch.bool
        least = args[0].numel() if buffer else 0
        return tree_map(lambda leaf: self.without_values(leaf, spread, least), values)

    def _tell_of_spread(self, given: Any) -> bool:
        """Whether a shape follows from positions that were spread evenly, which is counted."""
        spread = any(map(_is_spread, tree_leaves(given)))
        if spread:
            self.spread[self.line()] += 1
        return spread

    def without_values(self, tensor: Any, spread: bool = False, least: int = 0) -> Any:
        """A tensor on the GPU of the same shape, whose values are followed.

        `unique_consecutive` makes its results as long as what it is given and then shortens them,
        which frees nothing: the storage is as large as that of the values.

        least  elements that the storage of one that is not empty holds at least
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        held = tensor.untyped_storage().nbytes() // tensor.element_size()
        held = max(held, least) if tensor.numel() else held
        with self.places.forced(True):
            whole = torch.empty(held, dtype=tensor.dtype)
            fake = whole.as_strided(tensor.shape, tensor.stride())
        setattr(fake, NAME, _Known(tensor, [True], spread))
        return fake


def _is_spread(tensor: Any) -> bool:
    known = getattr(tensor, NAME, None)
    return known is not None and known.spread


def _computed(function: Callable, args: Any, kwargs: Any) -> Any:
    """The operation on the values of its arguments, None where a CPU refuses it."""

    def real(value: Any) -> Any:
        return values_of(value) if isinstance(value, torch.Tensor) else value

    try:
        with disable_current_modes(), torch.no_grad():
            return function(*tree_map(real, args), **tree_map(real, kwargs))
    except (RuntimeError, NotImplementedError, IndexError):
        return None


def _never(function: Callable, args: Any, result: Any) -> torch.Tensor | None:
    """What holds whatever the values are: a number is finite and equal to itself, and one side that
    is known settles an `and` or an `or`."""
    if not isinstance(result, torch.Tensor) or result.numel() > LARGEST:
        return None
    if function in AND and any(_all_are(one, False) for one in args):
        answer = False
    elif function in OR and any(_all_are(one, True) for one in args):
        answer = True
    elif function in NEVER or (function is aten.ne.Tensor and args[0] is args[1]):
        answer = False
    elif function is aten.eq.Tensor and args[0] is args[1]:
        answer = True
    elif function is aten.ne.Scalar and args[1] == torch.inf:
        answer = True
    elif function is aten.eq.Scalar and args[1] == torch.inf:
        answer = False
    else:
        return None
    with disable_current_modes():
        return torch.full(result.shape, answer, dtype=result.dtype)


def _all_are(held: Any, answer: bool) -> bool:
    """Whether it is known to be true, or false, at every place."""
    known = values_of(held) if isinstance(held, torch.Tensor) else None
    if known is None or known.is_meta or (answer and known.dtype is not torch.bool):
        return False
    with disable_current_modes():
        return bool((known.bool() == answer).all())


def _longest(lengths: Any) -> int | None:
    """The largest of lengths, None where they are not known."""
    if not isinstance(lengths, torch.Tensor):
        return max(lengths, default=0)
    known = values_of(lengths)
    with disable_current_modes():
        return None if known is None else int(known.max())


def _without_masks(indices: Any) -> list[Any]:
    """Indices with each mask replaced by the positions at which it is true, where it is known."""
    if not isinstance(indices, (list, tuple)):
        return indices
    positions: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        values = values_of(index) if is_mask else None
        if values is None:
            positions.append(index)
            continue
        with disable_current_modes():
            found = values.nonzero().unbind(1)
        positions += [part.contiguous() for part in found]
    return positions


class AskedForAll(TorchFunctionMode):
    """Calls that hand all values of a tensor to Python or NumPy, or read them from a list."""

    def __init__(self, known: KnownValues):
        super().__init__()
        self.known = known

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in ALL_VALUES and isinstance(args[0], FakeTensor):
            return handed_over(self.known, function, args, kwargs)
        if function is torch.tensor:
            args = with_numbers(args)
        return function(*args, **kwargs)


@contextmanager
def known_values() -> Iterator[None]:
    """Inside, in `FakeTensorMode`, the values of a batch are followed, all on one device."""
    places = Places()
    known = KnownValues(places)
    with places.forced(True), known, AskedForAll(known):
        yield


def with_numbers(args: tuple) -> tuple:
    """Arguments of `torch.tensor`: a number for each tensor of one, whose memory it would read."""
    if not args or not isinstance(args[0], (list, tuple)):
        return args
    return tree_map(_number, args[0]), *args[1:]


def _number(leaf: Any) -> Any:
    return leaf.item() if isinstance(leaf, FakeTensor) and leaf.numel() == 1 else leaf


def handed_over(known: KnownValues, function: Callable, args: tuple, kwargs: dict) -> Any:
    """What one of `ALL_VALUES` gives."""
    with disable_current_modes(), torch._C.DisableTorchFunction():
        return function(known.all_values(args[0]), *args[1:], **kwargs)


ALL_VALUES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
