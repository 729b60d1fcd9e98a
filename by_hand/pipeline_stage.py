"""A model cut into stages. Each has some layers, under the names that they have in the model.

Between stages travel the hidden states, fp32 [examples, tokens, hidden size], and for DeBERTa the
attention mask, uint8 [examples, tokens]. The mask of all pairs and the relative positions are
cheaper to compute again than to send. DeBERTa's relative position embeddings, and their LayerNorm,
are read by all layers: every stage has a copy, and the gradients of the copies must be summed over
the stages, as those of tied weights are, so that the copies stay equal
(`by_hand.pipeline.share_gradients`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tight_fit.checks import whole
from tight_fit.techniques.step import Batch

SHARED = ("deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm")


class Stage(nn.Module):
    """Some layers of a model; the state dicts of all stages together are that of the model.

    The first stage takes the batch's inputs, as a dict or in the dict's order; the others take what
    the stage before returned: a tuple of the hidden states and, for DeBERTa, the mask. The last
    stage returns logits [examples, classes].

    model   DeBERTa or ViT of `helpers.models`; its modules become the stage's own
    index   of this stage, from 0
    stages  how many there are
    layers  indices of the transformer layers that belong to this stage
    """

    # Parts of the model: which of them a stage has depends on the model and on the stage.
    config: Any
    deberta: Any
    vit: Any
    pooler: Any
    dropout: Any
    classifier: Any

    def __init__(self, model: nn.Module, index: int, stages: int, layers: Sequence[int]):
        super().__init__()
        self.index, self.stages, self.layers = index, stages, tuple(layers)
        self.first, self.last = index == 0, index == stages - 1
        self.config, self.text = model.config, hasattr(model, "deberta")
        self._layer_path = _layer_path(model)
        paths = []
        if self.first:
            paths.append("deberta.embeddings" if self.text else "vit.embeddings")
        paths += [self._layer_path.format(layer) for layer in layers]
        if self.last and self.text:
            paths += ["pooler", "dropout", "classifier"]
        elif self.last:
            paths += ["vit.layernorm", "classifier"]
        for path in paths:
            _add_submodule(self, path, model.get_submodule(path))
        for path in SHARED if self.text else ():
            if _has(model, path):
                shared = model.get_submodule(path)
                _add_submodule(self, path, shared if self.first else _copy(shared))
        self.train(model.training)

    def forward(self, *inputs):
        return self._forward_text(*inputs) if self.text else self._forward_image(*inputs)

    def _forward_text(self, *inputs):
        if self.first:
            ids, mask = _in_order(inputs, "input_ids", "attention_mask")
            hidden, mask = self.deberta.embeddings(input_ids=ids, mask=mask), mask.to(torch.uint8)
        else:
            hidden, mask = inputs
        pairs = mask[:, None, :, None] * mask[:, None, None, :]
        positions, relative = self._relative_positions(hidden)
        for layer in self._transformer_layers():
            hidden = _hidden_states(
                layer(hidden, pairs, relative_pos=positions, rel_embeddings=relative)
            )
        return self.classifier(self.dropout(self.pooler(hidden))) if self.last else (hidden, mask)

    def _relative_positions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(relative positions of all pairs of tokens, their embeddings), the same in all stages."""
        # Imported here because it takes seconds and only DeBERTa needs it.
        from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

        encoder = self.deberta.encoder
        buckets, most = self.config.position_buckets, self.config.max_relative_positions
        most = self.config.max_position_embeddings if most < 1 else most
        embeddings = encoder.rel_embeddings.weight
        return (
            build_relative_position(hidden, hidden, bucket_size=buckets, max_position=most),
            encoder.LayerNorm(embeddings) if _has(encoder, "LayerNorm") else embeddings,
        )

    def _forward_image(self, *inputs):
        if self.first:
            hidden = self.vit.embeddings(*_in_order(inputs, "pixel_values"))
        else:
            hidden = inputs[0]
        for layer in self._transformer_layers():
            hidden = _hidden_states(layer(hidden))
        return self.classifier(self.vit.layernorm(hidden)[:, 0]) if self.last else (hidden,)

    def _transformer_layers(self):
        return (self.get_submodule(self._layer_path.format(layer)) for layer in self.layers)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def arrives(self, batch: Batch) -> list[Tensor]:
        """Tensors like those that the stage before sends for a micro-batch.

        They have the right shape, dtype and device, and the memory of a single element.
        """
        examples = len(batch["labels"])
        if self.text:
            tokens = batch["input_ids"].shape[1]
        else:
            tokens = 1 + (self.config.image_size // self.config.patch_size) ** 2
        hidden = torch.empty((), device=self.device)
        like = [hidden.expand(examples, tokens, self.config.hidden_size)]
        if self.text:
            mask = torch.empty((), dtype=torch.uint8, device=self.device)
            like.append(mask.expand(examples, tokens))
        return like

    def shared(self) -> list[nn.Parameter]:
        """The parameters that every stage has a copy of."""
        return [value for name, value in self.named_parameters() if name.startswith(SHARED)]


def cut(model: nn.Module, stages: int) -> list[Stage]:
    """The course's DeBERTa or ViT in stages: embeddings in the first, the classifier in the last.

    Where the layers cannot be divided evenly, later stages get one more: they hold fewer
    micro-batches. The stages take over the model's own modules; once the model and the other stages
    are dropped, their memory is free. Tensors without values (`FakeTensorMode`) can be cut too.
    Raises TypeError where `stages` is not an int, ValueError for less than one stage or more stages
    than layers, and for another model.
    """
    config: Any = getattr(model, "config", None)
    if not (hasattr(model, "deberta") or hasattr(model, "vit")) or config is None:
        raise ValueError(
            f"{type(model).__name__} is neither of the course's models: only DeBERTa and ViT can "
            "be cut. Make the model with helpers.models.build."
        )
    whole("stages", stages, 1)
    total = config.num_hidden_layers
    if stages > total:
        raise ValueError(
            f"stages={stages} is more than the {total} layers of the model: use at most {total}."
        )
    ends = [total * index // stages for index in range(stages + 1)]
    return [
        Stage(model, index, stages, range(ends[index], ends[index + 1])) for index in range(stages)
    ]


def _hidden_states(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """What a layer returns: releases of transformers differ in whether it comes in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def _in_order(inputs: tuple, *names: str) -> list[Tensor]:
    return [inputs[0][name] for name in names] if isinstance(inputs[0], Mapping) else list(inputs)


def _layer_path(model: nn.Module) -> str:
    if hasattr(model, "deberta"):
        return "deberta.encoder.layer.{}"
    older = "vit.encoder.layer.{}"  # in older releases of transformers
    return "vit.layers.{}" if _has(model, "vit.layers") else older


def _copy(module: nn.Module) -> nn.Module:
    """A copy of a module without children, with parameters of its own.

    `copy.deepcopy` warns about tensors without values.
    """
    copied = copy.copy(module)
    copied._parameters = {
        name: nn.Parameter(value.detach().clone(), value.requires_grad)
        for name, value in module.named_parameters()
    }
    return copied


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
        return True
    except AttributeError:
        return False


def _add_submodule(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a dotted path below `root`, with empty modules on the way."""
    *above, last = path.split(".")
    for name in above:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, module)
