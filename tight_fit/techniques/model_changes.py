"""What the fields of a recipe do to a model: gradient checkpointing, LoRA adapters, freezing.

The same functions change the course's models and any other Hugging Face model. What differs
between models, such as the names of the projections, is passed as an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import import_utils

from tight_fit.techniques.compiled import compiling_when_called

Recompute = Callable[[], AbstractContextManager]

# DeBERTa's relative position embeddings and their LayerNorm lie in the encoder, but belong to the
# embeddings: every layer reads them, so while they train the backward pass goes through all layers.
EMBEDDINGS = re.compile(r"\w+\.embeddings\.|\w+\.encoder\.(rel_embeddings|LayerNorm)\.")


def enable_checkpointing(model: PreTrainedModel, recompute: Recompute = nullcontext) -> None:
    """Recompute each layer's activations in the backward pass (Chen et al. 2016), in place.

    recompute  makes the context in which a layer runs for the second time
    """
    # The reentrant kind loses gradients without a warning when the embeddings are frozen.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), recompute())})
    # The library also makes the embeddings' output require a gradient, which only the reentrant
    # kind needs. The backward pass would then go through every frozen layer.
    model.disable_input_require_grads()


def add_lora(
    model: nn.Module,
    rank: int,
    targets: Collection[str],
    layers: Iterable[int] | None = None,
    alpha: float | None = None,
    scale: str = "alpha/r",
) -> None:
    """Put LoRA adapters of `rank` beside the projections named `targets`, in place, with peft.

    LoRA, Hu et al. 2021: x W + (α/r) x A B, with A drawn at random (peft: Kaiming uniform) and B
    zero, so that the model's output is at first unchanged; no dropout.

    layers  indices of the layers that get adapters; None for all
    alpha   α; None is 2 r
    scale   "alpha/r", or "alpha/sqrt(r)", with which high ranks keep their share of the output
            (rsLoRA, Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)
    """
    with compiling_when_called():
        from peft import LoraConfig, inject_adapter_in_model  # takes long to import

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]  # any number
        target_modules=list(targets),
        use_rslora=scale == "alpha/sqrt(r)",
        layers_to_transform=None if layers is None else list(layers),
    )
    inject_adapter_in_model(lora, model)
    for parameter in trained:  # peft freezes them all, a new head too; `freeze` decides here
        parameter.requires_grad_(True)


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Stop the parameters of these names from training, in place."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def layer_stack(model: nn.Module, count: int | None) -> str | None:
    """Name of the model's one list of `count` layers, such as "deberta.encoder.layer".

    None where the model has no such list or several (encoder and decoder, or stages).
    """
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    return lists[0] if len(lists) == 1 else None


def embeddings_and_layers(model: nn.Module, stack: str, count: int) -> set[str]:
    """Names of the parameters of the embeddings and of the first `count` layers of `stack`.

    To the embeddings belong all parameters before the layers, every `nn.Embedding`, and the names
    that `EMBEDDINGS` matches.
    """
    names = [name for name, _ in model.named_parameters()]
    first = next(index for index, name in enumerate(names) if name.startswith(f"{stack}."))
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    layers = tuple(f"{stack}.{index}." for index in range(count))
    return {
        name
        for index, name in enumerate(names)
        if index < first or name in tables or name.startswith(layers) or EMBEDDINGS.match(name)
    }


def check_trainable(
    model: nn.Module, frozen: Collection[str] = (), dtype: torch.dtype = torch.float32
) -> None:
    """Check that every parameter but the `frozen` ones is stored in `dtype` and trains.

    Raises RuntimeError for one that is not or does not.
    """
    for name, parameter in model.named_parameters():
        if name in frozen:
            continue
        if parameter.dtype != dtype:
            raise RuntimeError(
                f"{name} was loaded as {parameter.dtype}: load with dtype=torch.float32, "
                "half-precision weights under AdamW lose small updates or end in NaN."
            )
        if not parameter.requires_grad:
            raise RuntimeError(f"{name} does not train although the recipe does not freeze it.")


@contextmanager
def as_if_real(convert: bool = False) -> Iterator[None]:
    """Inside, the libraries treat tensors without values (`FakeTensor`) as they treat real ones.

    `nn.Module.to` does nothing. peft calls it to move new adapters to the device and dtype of their
    layer, and some models call it on a part of themselves in the forward pass. Here all is fp32 on
    one device, so on real tensors these calls change nothing. On fake tensors they fail: PyTorch
    would swap each parameter for a new one, and cannot where something else refers to it
    ("_apply(): Couldn't swap Linear.weight").

    transformers asks `is_fake_tensor` to avoid code that reads values. It is told False, so that
    the operations are those of the real step.

    convert  True: `nn.Module.to`, `.bfloat16()`, `.half()`, `.float()`, `.double()` and `.cuda()`
             convert and move. Each parameter stays the same object and gets new data, as on real
             tensors, so that tied weights and an optimizer that was made before stay right.
    """
    changed = {"_apply": _apply} if convert else {"to": lambda module, *args, **kwargs: module}
    with (
        patch.multiple(nn.Module, **changed),
        patch.object(import_utils, "is_fake_tensor", lambda tensor: False),
    ):
        yield


def _apply(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
    """What `nn.Module._apply` does to real tensors: new data for every parameter and gradient."""
    if recurse:
        for child in module.children():
            child._apply(function, recurse)  # as RNNs have one of their own
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            applied = function(parameter)
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = None  # a gradient has the dtype of its parameter
                gradient = function(gradient)
            if applied is not parameter:
                parameter.data = applied
            parameter.grad = gradient
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


@contextmanager
def quiet() -> Iterator[None]:
    """transformers prints neither warnings nor progress bars inside.

    It would report a new head as missing weights, which `build` checks itself.
    """
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules are made in this dtype, as transformers' `from_pretrained` makes them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
