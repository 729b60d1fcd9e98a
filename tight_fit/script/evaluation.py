"""Evaluation: planned with the training that it belongs to, equal batches of it only twice.

Before the first step a program evaluates as it likes. Once the memory of its training has settled,
its loader of training batches comes to an end, Trainer is told to evaluate, and what the program
does then is followed until it trains again. A model that is called without gradients, in evaluation
mode or once the training is planned, on batches of one shape takes the same memory each time: after
two such calls its results are made without computing them, from as much memory.

What a model of transformers generates is as long as it may become, and each new token is the same.
"""

from __future__ import annotations

import ast
import copy
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, GenerationMixin
from transformers.trainer_callback import DefaultFlowCallback

from tight_fit.script import values
from tight_fit.script.watch import ScriptTracker
from tight_fit.torch_private import FakeTensor, disable_current_modes
from tight_fit.trace.known_values import KnownValues, know, values_of
from tight_fit.trace.storage_trace import BORN, DIES

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
EVALUATES = {"evaluate", "validate", "generate", "predict"}  # methods of models and trainers
MOST_RESIDENT = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 5  # bytes
Sizes = list[tuple[int, bool]]  # bytes, and whether they are on the GPU


class Evaluation:
    """What a program evaluates.

    line      of the program that called its model to evaluate, "" for none so far
    generates line at which a model has generated text first, "" for none so far
    calls     of the model
    marks     event at which each call of the last one began
    windows   [first event, event after the last] of each evaluation
    stopped   why the last one was not followed to its end, "" where it was
    under_way whether one is, now
    forced    whether Trainer is told to evaluate after its next step
    after     whether training is planned: who forgets `eval()` evaluates all the same from then on
    """

    def __init__(self, tracker: ScriptTracker, known: KnownValues):
        self.tracker, self.known = tracker, known
        self.line, self.calls, self.forced, self.stopped = "", 0, False, ""
        self.after = False
        self.generates = ""
        self.windows: list[list[int]] = []
        self.marks: list[int] = []
        self._memory_before = 0
        self.under_way = False
        self._depth = 0
        self._trained: set[int] = set()  # ids of what optimizers have been given
        self._seen: dict[Any, Sizes] = {}
        self._made: dict[Any, tuple[Sizes, Any]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls of models are followed."""
        call, flow = nn.Module.__call__, DefaultFlowCallback.on_step_end
        generate = GenerationMixin.generate
        add = torch.optim.Optimizer.add_param_group

        def added(optimizer, group):
            add(optimizer, group)
            self._trained |= {id(one) for one in optimizer.param_groups[-1]["params"]}

        def called(module, *args, **kwargs):
            if self._depth:
                return call(module, *args, **kwargs)
            self._depth += 1
            try:
                trains = module.training and not self.after
                if torch.is_grad_enabled() or trains or not self._trains(module):
                    if torch.is_grad_enabled():
                        self.close()
                    return call(module, *args, **kwargs)
                return self._evaluate(call, module, args, kwargs)
            finally:
                self._depth -= 1

        def generated(model, *args, **kwargs):
            if self._depth or model.training or not self._trains(model):
                made = generate(model, *args, **kwargs)
            else:
                self._depth += 1
                try:
                    made = self._evaluate(generate, model, args, kwargs)
                finally:
                    self._depth -= 1
            prompt = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
            self._write(made, model, prompt)
            return made

        def never_ends(criterion, input_ids, scores, **kwargs):
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        def on_step_end(callback, arguments, state, control, **kwargs):
            control = flow(callback, arguments, state, control, **kwargs)
            if self.forced and str(getattr(arguments.eval_strategy, "value", "no")) != "no":
                self.forced, control.should_evaluate = False, True
            return control

        with (
            patch.object(nn.Module, "__call__", called),
            patch.object(GenerationMixin, "generate", generated),
            patch.object(EosTokenCriteria, "__call__", never_ends),
            patch.object(torch.optim.Optimizer, "add_param_group", added),
            patch.object(DefaultFlowCallback, "on_step_end", on_step_end),
        ):
            yield

    def _trains(self, module: nn.Module) -> bool:
        """Whether it is trained: a model of reference, as DPO has, is not, and is no evaluation."""
        parameters = [one for one in module.parameters() if one.requires_grad]
        return any(not self._trained or id(one) in self._trained for one in parameters)

    def close(self) -> None:
        """The program trains again, or ends."""
        if self.under_way:
            self.windows[-1][1], self.under_way = len(self.tracker.storage_trace.events), False

    def _evaluate(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        events = self.tracker.storage_trace.events
        if not self.under_way:
            self.windows.append([len(events), 0])
            self.under_way = True
            self.marks, self._memory_before = [], _resident()
        self.calls += 1
        self.marks.append(len(events))
        if self.calls % 8 == 0 and _resident() - self._memory_before > MOST_RESIDENT:
            raise values.NotFollowed("what it keeps in the host's memory fills this machine")
        self.line = self.line or self.tracker.code.line()
        try:
            key = (id(module), _described((args, kwargs), self.tracker), _autocast())
        except NotImplementedError:
            return call(module, *args, **kwargs)
        if key in self._made and self.tracker.recorder is None:
            sizes, made = self._made[key]
            inside = [self._memory(*size) for size in sizes]
            del inside
            return copy.deepcopy(made)
        begin, first = len(events), len(self.tracker.storage_trace.bytes)
        out = call(module, *args, **kwargs)
        sizes, left = self._inside(begin, first)
        if self._seen.get(key) == sizes and _is_data(out) and left == self._storages(out):
            with patch.object(values, "copied", lambda tensor, memo: _Blank(tensor, self)):
                self._made[key] = sizes, copy.deepcopy(out)
        self._seen[key] = sizes
        return out

    def _inside(self, begin: int, first: int) -> tuple[Sizes, set[int]]:
        """(what a call had made and held when that was most, the storages that it left)."""
        trace = self.tracker.storage_trace
        alive = most = 0
        at = begin
        held: set[int] = set()
        now: set[int] = set()
        for _ in range(2):  # once to find the moment, once to see what is held then
            alive = 0
            now = set()
            for place, (kind, storage, _, _) in enumerate(trace.events[begin:], begin):
                if storage < first or kind not in (BORN, DIES):
                    continue
                alive += trace.bytes[storage] * (1 if kind == BORN else -1)
                (now.add if kind == BORN else now.discard)(storage)
                if alive > most:
                    most, at = alive, place
                if place == at:
                    held = set(now)
        host = self.tracker.host
        return sorted((trace.bytes[one], one not in host) for one in held), now

    def _storages(self, out: Any) -> set[int]:
        tensors = _tensors(out)
        found = {self.tracker.number_of(tensor) for tensor in tensors}
        whole = all(t.untyped_storage().nbytes() == t.numel() * t.itemsize for t in tensors)
        return found if whole and len(found) == len({id(t) for t in tensors}) else {-1}

    def _write(self, made: Any, model: Any, prompt: Any) -> None:
        """Give what was generated values: those of the prompt, and a token that ends nothing."""
        ids = made if isinstance(made, torch.Tensor) else getattr(made, "sequences", None)
        if not isinstance(ids, FakeTensor):
            return
        self.generates = self.generates or self.tracker.code.line()
        special = _special(model.generation_config)
        begin = values_of(prompt) if isinstance(prompt, torch.Tensor) else None
        with disable_current_modes():
            token = model.config.get_text_config(decoder=True).vocab_size // 2
            while token in special:
                token -= 1
            written = torch.full(ids.shape, token)
            if begin is not None and begin.dim() == 2 and not model.config.is_encoder_decoder:
                rows = len(ids) // len(begin)
                written[:, : begin.shape[1]] = begin.repeat_interleave(rows, 0)
        know(ids, written)

    def _memory(self, size: int, on_gpu: bool) -> torch.Tensor:
        with self.known.places.forced(on_gpu):
            return self.known.empty((size,), (1,), torch.uint8)

    def made(self, blank: _Blank) -> torch.Tensor:
        """A tensor of the same kind without values."""
        with self.known.places.forced(blank.on_gpu):
            return self.known.empty(blank.size, blank.stride, blank.dtype)


def _resident() -> int:
    """Most bytes of memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class _Blank:
    """Stands for a tensor in a result; a deep copy of the result has tensors again."""

    def __init__(self, tensor: torch.Tensor, evaluation: Evaluation):
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.on_gpu, self.evaluation = evaluation.known.places.on_gpu(tensor), evaluation

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.evaluation.made(self)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _special(generation: Any) -> set[Any]:
    """The tokens that begin, end or fill what is generated."""
    names = "bos_token_id", "eos_token_id", "pad_token_id"
    given = [getattr(generation, name) for name in names]
    return {token for one in given for token in (one if isinstance(one, list) else [one])}


def _described(held: Any, tracker: ScriptTracker) -> Any:
    """What a call's memory depends on, of its arguments. Raises NotImplementedError for others."""
    if isinstance(held, torch.Tensor):
        known = None if held.dtype.is_floating_point else values_of(held)
        whole = None if known is None or known.is_meta else _without_zero(known)
        return tuple(held.shape), held.stride(), held.dtype, tracker.places.on_gpu(held), whole
    if isinstance(held, PLAIN):
        return held
    if isinstance(held, (list, tuple)):
        return tuple(_described(one, tracker) for one in held)
    if hasattr(held, "keys"):
        return tuple((name, _described(held[name], tracker)) for name in held.keys())
    raise NotImplementedError


def _without_zero(known: torch.Tensor) -> bool:
    """Whether a mask masks nothing, by which libraries choose a kernel; what is no mask has none.

    Ids of tokens are drawn, and some batches have the token 0.
    """
    with disable_current_modes():
        return bool((known != 0).all() or (known > 1).any() or (known < 0).any())


def _is_data(held: Any) -> bool:
    if isinstance(held, (list, tuple)):
        return all(map(_is_data, held))
    if isinstance(held, dict):
        return all(map(_is_data, held.values()))
    return isinstance(held, (FakeTensor, Cache, *PLAIN))


def _tensors(held: Any) -> list[torch.Tensor]:
    """The tensors of a result, of a cache of keys and values too."""
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, Cache):
        held = [vars(layer) for layer in held.layers]
    if isinstance(held, dict):
        held = list(held.values())
    if isinstance(held, (list, tuple)):
        return [tensor for one in held for tensor in _tensors(one)]
    return []


def first_call(script: str) -> int | None:
    """The line at which a program's text evaluates its model, None where none does."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    calls = [
        (node.func, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    trained = {ast.unparse(method.value) for method, _ in calls if method.attr == "train"}
    lines = [
        line
        for method, line in calls
        if method.attr in EVALUATES
        or (method.attr == "eval" and ast.unparse(method.value) in trained)
    ]
    return min(lines, default=None)
