"""A model cut into stages. Each keeps its part of the layers, under the names that they have in the whole model.

Between stages travel the hidden states, fp32 (rows, tokens, width), and for DeBERTa the attention mask, one byte a token;
the mask's square and the relative positions are cheaper to make again than to send. DeBERTa's relative position
embeddings, and their LayerNorm, are read by all layers: every stage has a copy, and their gradients are to be summed over
the stages, like those of tied weights, so that the copies stay equal (`stages.share_gradients`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
SHARED = ("deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm")


class Stage(nn.Module):
    """Some layers of a model, under the names that they have there: the stages' state dicts together are the model's.

    The first takes the batch's inputs (a dict, or in its order), the others what the stage before returned: a tuple of
    the hidden states and, for DeBERTa, the mask. The last returns logits (rows, classes).
    """

    def __init__(self, model: nn.Module, index: int, stages: int, layers: Sequence[int]):
        super().__init__()
        self.index, self.stages, self.layers = index, stages, tuple(layers)
        self.first, self.last = index == 0, index == stages - 1
        self.config, self.text = model.config, hasattr(model, "deberta")
        self._layer = _layer_path(model)
        paths = ["deberta.embeddings" if self.text else "vit.embeddings"] if self.first else []
        paths += [self._layer.format(layer) for layer in layers]
        if self.last:
            paths += (
                ["pooler", "dropout", "classifier"]
                if self.text
                else ["vit.layernorm", "classifier"]
            )
        for path in paths:
            _place(self, path, model.get_submodule(path))
        for path in SHARED if self.text else ():
            if _has(model, path):
                _place(
                    self,
                    path,
                    model.get_submodule(path) if self.first else _copy(model.get_submodule(path)),
                )
        self.train(model.training)

    def forward(self, *inputs):
        return self._text(*inputs) if self.text else self._image(*inputs)

    def _text(self, *inputs):
        if self.first:
            ids, mask = _in_order(inputs, "input_ids", "attention_mask")
            hidden, mask = self.deberta.embeddings(input_ids=ids, mask=mask), mask.to(torch.uint8)
        else:
            hidden, mask = inputs
        pairs = mask[:, None, :, None] * mask[:, None, None, :]
        positions, relative = self._relative(hidden)
        for layer in self.layers:
            hidden = _only(
                self.get_submodule(self._layer.format(layer))(
                    hidden, pairs, relative_pos=positions, rel_embeddings=relative
                )
            )
        return self.classifier(self.dropout(self.pooler(hidden))) if self.last else (hidden, mask)

    def _relative(self, hidden: Tensor):
        """(relative positions of all pairs, their embeddings), made again by every stage."""
        from transformers.models.deberta_v2.modeling_deberta_v2 import (
            build_relative_position,
        )  # slow to import

        encoder = self.deberta.encoder
        buckets, most = self.config.position_buckets, self.config.max_relative_positions
        most = self.config.max_position_embeddings if most < 1 else most
        embeddings = encoder.rel_embeddings.weight
        return (
            build_relative_position(hidden, hidden, bucket_size=buckets, max_position=most),
            encoder.LayerNorm(embeddings) if _has(encoder, "LayerNorm") else embeddings,
        )

    def _image(self, *inputs):
        hidden = (
            self.vit.embeddings(*_in_order(inputs, "pixel_values")) if self.first else inputs[0]
        )
        for layer in self.layers:
            hidden = _only(self.get_submodule(self._layer.format(layer))(hidden))
        return self.classifier(self.vit.layernorm(hidden)[:, 0]) if self.last else (hidden,)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def arrives(self, batch: Batch) -> list[Tensor]:
        """Tensors like those that a stage other than the first is given for a micro-batch (of no memory of their own)."""
        rows = len(batch["labels"])
        if not self.text:
            tokens = 1 + (self.config.image_size // self.config.patch_size) ** 2
            return [
                torch.empty((), device=self.device).expand(rows, tokens, self.config.hidden_size)
            ]
        tokens = batch["input_ids"].shape[1]
        return [
            torch.empty((), device=self.device).expand(rows, tokens, self.config.hidden_size),
            torch.empty((), dtype=torch.uint8, device=self.device).expand(rows, tokens),
        ]

    def shared(self) -> list[nn.Parameter]:
        """The parameters that every stage has a copy of."""
        return [value for name, value in self.named_parameters() if name.startswith(SHARED)]


def cut(model: nn.Module, stages: int) -> list[Stage]:
    """The course's DeBERTa or ViT in stages: embeddings with the first, head with the last, layers shared out evenly.

    Where the layers do not divide, later stages get one more: they hold fewer micro-batches. The stages take the model's
    own modules; drop the model and the other stages, and their memory is free. Works on tensors without values too.
    Raises ValueError for fewer layers than stages, or another model.
    """
    total = (
        model.config.num_hidden_layers if hasattr(model, "deberta") or hasattr(model, "vit") else 0
    )
    if not total:
        raise ValueError(
            f"{type(model).__name__} is neither of the course's models: only DeBERTa and ViT can be cut."
        )
    if isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= total:
        raise ValueError(
            f"stages={stages!r} must be a whole number from 1 to the {total} layers of the model."
        )
    ends = [total * index // stages for index in range(stages + 1)]
    return [
        Stage(model, index, stages, range(ends[index], ends[index + 1])) for index in range(stages)
    ]


def _only(output):
    return output[0] if isinstance(output, tuple) else output


def _in_order(inputs: tuple, *names: str) -> list[Tensor]:
    return [inputs[0][name] for name in names] if isinstance(inputs[0], Mapping) else list(inputs)


def _layer_path(model: nn.Module) -> str:
    if hasattr(model, "deberta"):
        return "deberta.encoder.layer.{}"
    return (
        "vit.layers.{}" if _has(model, "vit.layers") else "vit.encoder.layer.{}"
    )  # older releases


def _copy(module: nn.Module) -> nn.Module:
    """A module without children, with parameters of its own (deepcopy warns about tensors without values)."""
    made = copy.copy(module)
    made._parameters = {
        name: nn.Parameter(value.detach().clone(), value.requires_grad)
        for name, value in module.named_parameters()
    }
    return made


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
        return True
    except AttributeError:
        return False


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    *above, last = path.split(".")
    for name in above:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    root.add_module(last, module)
