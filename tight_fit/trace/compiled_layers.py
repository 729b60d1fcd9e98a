"""A step whose layers are compiled, each by itself, on tensors without values.

`layer.compile()` for each layer is what PyTorch calls regional compilation. What a layer keeps for
its backward pass is decided by inductor's own partitioner, which runs here; its kernels are those
of `trace.fused_graph`. Layers that are alike share one compilation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from tight_fit.techniques.eight_bits import (
    DECOMPOSED,
    LARGEST,
    PRODUCT,
    WHOLE,
    Product8bit,
    whole_product,
)
from tight_fit.torch_private import inductor, tree_flatten, tree_unflatten
from tight_fit.trace.fused_graph import FusedGraph
from tight_fit.trace.repeated_layers import kind_of, signature
from tight_fit.trace.tracker import Tracker

SIZES = 3  # of the inputs of a user's module; PyTorch takes from the second on any, as variables
# What changes a backward pass in a way that a graph of the forward pass does not hold.
OWN_BACKWARD = (
    (torch.autograd.Function, "apply"),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
)
Policy = torch.utils.checkpoint.CheckpointPolicy
# Says of each operation of a layer, in order, whether its result is kept.
Keeps = Callable[[Callable], bool]


@contextmanager
def compiled_layers(
    layers: Iterable[nn.Module], tracker: Tracker, keeps: Callable[[], Keeps] | None = None
) -> Iterator[None]:
    """Inside, these layers run compiled where gradients are on, with a tracker that is active.

    keeps  for selective checkpointing inside of what is compiled: begins a layer. None leaves to
           the partitioner what is kept, or keeps nothing of a layer that checkpoints itself
    """
    compiled = Compiler(tracker, keeps)
    with ExitStack() as changed:
        for layer in layers:
            changed.enter_context(patch.object(layer, "forward", compiled.in_place_of(layer)))
        yield


class _Inside(nn.Module):
    """A module by its own `forward`, without the checkpointing that transformers does there."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.run = layer, layer.forward

    def forward(self, args: Any, kwargs: Any) -> Any:
        if not self.checkpoints:
            return self.run(*args, **kwargs)
        with patch.object(self.layer, "gradient_checkpointing", False):
            return self.run(*args, **kwargs)

    @property
    def checkpoints(self) -> bool:
        """Whether the layer's `forward` checkpoints itself. That of older transformers is in
        `__call__`, around what is compiled, and needs nothing here."""
        inside = type(self.layer).__call__ is nn.Module.__call__
        return inside and bool(getattr(self.layer, "gradient_checkpointing", False))


@dataclass
class Compiler:
    """The compilations of a step.

    refuses  is told of a user's module that cannot be planned compiled, which from then on runs
             as it is; None raises ValueError instead. Refused are those that checkpoint inside,
             have a backward pass of their own, or get inputs of more than `SIZES` sizes
    known    (what decides a compilation, what it made, the structure of the results)
    """

    tracker: Tracker
    keeps: Callable[[], Keeps] | None = None
    refuses: Callable[[ValueError], None] | None = None
    known: list[tuple[Any, Callable, Any]] = field(default_factory=list)

    def in_place_of(self, layer: nn.Module) -> Callable:
        """What is called for a layer's `forward`."""
        inside = _Inside(layer)
        refused: list[ValueError] = []

        @wraps(layer.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if refused or not torch.is_grad_enabled():
                return inside(args, kwargs)
            try:
                function, tensors, shape = self._compiled(inside, args, kwargs)
            except ValueError as error:
                if self.refuses is None:
                    raise
                refused.append(error)
                self.refuses(error)
                return inside(args, kwargs)
            with torch.autocast("cpu", enabled=False):
                return tree_unflatten(list(function(*tensors)), shape)

        return forward

    def _compiled(
        self, inside: _Inside, args: Any, kwargs: Any
    ) -> tuple[Callable, list[torch.Tensor], Any]:
        """(what runs compiled, what it is called with, the structure of its results)."""
        leaves, structure = tree_flatten((args, kwargs))
        own = dict(inside.named_parameters()) | dict(inside.named_buffers())
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [*own.values(), *(leaves[place] for place in places)]
        key = (
            signature(inside.layer),
            [kind_of(tensor) for tensor in tensors],
            [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)],
            structure,
            torch.is_autocast_enabled("cpu"),
        )
        found = [(function, shape) for known, function, shape in self.known if known == key]
        if not found:
            results: list[Any] = []

            def run(*values: torch.Tensor) -> list:
                given = list(leaves)
                for place, value in zip(places, values[len(own) :]):
                    given[place] = value
                weights, inputs = dict(zip(own, values)), tree_unflatten(given, structure)
                made, shape = tree_flatten(functional_call(inside, weights, inputs))
                results.append(shape)
                return made

            # Checkpointing around a layer counts what is saved, here only by what is compiled.
            with self.tracker.paused(), saved_tensors_hooks(_itself, _itself):
                try:
                    if self.refuses is not None and len(self.known) == SIZES:
                        _refuse()
                    function = self._compile(run, tensors, len(own), inside.checkpoints)
                except Exception as error:
                    raise ValueError(
                        f"What torch.compile makes of {type(inside.layer).__name__} cannot be "
                        f"planned ({type(error).__name__}): leave compile out."
                    ) from error
            found = [(function, results[-1])]
            self.known.append((key, *found[0]))
        function, shape = found[0]
        return function, tensors, shape

    def _compile(
        self, run: Callable, tensors: list[torch.Tensor], own: int, checkpoints: bool
    ) -> Callable:
        """What runs a function of tensors, of which the first `own` are a module's, as inductor
        would compile it."""
        alike = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
            if one.is_floating_point()
            else one.detach()  # of whole numbers a program's plan may know the values
            for one in tensors
        ]
        for new, one in zip(alike, tensors):
            new.requires_grad_(one.requires_grad)  # which attention is chosen depends on it
        with (
            patch.object(torch.compiler, "is_compiling", lambda: True),
            patch.object(Product8bit, "apply", whole_product),
        ):
            with ExitStack() as refused:
                for owner, name in OWN_BACKWARD if self.refuses is not None else ():
                    refused.enter_context(patch.object(owner, name, _refuse))
                graph = make_fx(run)(*alike)
            return self._cut(graph, alike, own, checkpoints)

    def _cut(
        self,
        graph: torch.fx.GraphModule,
        alike: list[torch.Tensor],
        own: int,
        checkpoints: bool,
    ) -> Callable:
        if self.keeps is not None:
            _tag(graph.graph, self.keeps())
        elif checkpoints:
            _tag(graph.graph, lambda function: False)

        def runs(graph: torch.fx.GraphModule, backward: bool) -> FusedGraph:
            return FusedGraph(graph, backward, self.tracker)

        with torch.autocast("cpu", enabled=False):
            tagged = _tagged_inside(graph.graph)
            return inductor(lambda graph: None, runs, DECOMPOSED, tagged, own)(graph, alike)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("A compiled module is not planned so.")


def _tag(graph: torch.fx.Graph, keeps: Keeps) -> None:
    """Mark operations as checkpointing inside of compiled code marks them."""
    for node in graph.nodes:
        if node.op == "call_function":
            kept = keeps(node.target)
            node.meta["recompute"] = Policy.MUST_SAVE if kept else Policy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def _tagged_inside(graph: torch.fx.Graph) -> Callable[[torch.fx.Graph], None]:
    """Marks what products in 8 bits consist of, once they are taken apart: one that is kept keeps
    the product itself, and all keep the largest number of a tensor where anything is kept, as
    torchtitan's `_save_list` says."""
    kept = {node.target for node in graph.nodes if node.meta.get("recompute") is Policy.MUST_SAVE}
    apart = any(node.target is WHOLE for node in graph.nodes)

    def tag(joint: torch.fx.Graph) -> None:
        for node in joint.nodes if apart and kept else ():
            if "recompute" not in node.meta or node.target is operator.getitem:
                continue
            if node.target is LARGEST:
                node.meta["recompute"] = Policy.MUST_SAVE
            elif node.target is not PRODUCT and node.target not in kept:
                node.meta["recompute"] = Policy.PREFER_RECOMPUTE

    return tag
