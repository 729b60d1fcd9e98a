"""Stages of a pipeline, cut out of any decoder of transformers that is built as Llama is.

A stage keeps transformers' own code: the decoder's body with a part of its layers, which reads
hidden states in place of tokens. The first stage has the embeddings, the last one the last norm and
the head. Between stages travel the hidden states [examples, tokens, width], and their gradients.
Examples have no padding, so that no mask travels with them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tight_fit.layouts.layout import Layout
from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep
from tight_fit.techniques.precision import DTYPES
from tight_fit.techniques.step import AUTOCAST, autocast

# Decoders whose body changes its hidden states in the layers only, so that a stage in the middle
# does nothing but its layers: tests compare their stages with the whole model. Others may scale
# the embeddings first (Gemma, Granite), or add positions to them (GPT-2).
TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "mixtral", "qwen3_moe")


def check_pipeline(model_step: ModelStep, layout: Layout) -> None:
    """Raises ValueError, in one sentence, where a step cannot be cut into a layout's stages."""
    config: Any = model_step.config
    if model_step.task != "causal-lm" or config.model_type not in TYPES:
        raise ValueError(
            f"A pipeline is planned for language models that are built as Llama is "
            f"({', '.join(TYPES)}), not for {config.model_type} with the task {model_step.task}: "
            "leave pipeline out."
        )
    if getattr(config, "tie_word_embeddings", False):
        raise ValueError(
            f"The head of this {config.model_type} is its embeddings, one tensor for both, and "
            "they would be on the last stage and on the first: leave pipeline out."
        )
    _check_layers(config, layout)
    _check_micro_batches(model_step.accumulation, layout)
    for name, left in (("lora_rank", None), ("frozen", None), ("loss", "full"), ("base", None)):
        value = getattr(model_step, name)
        if value != left and value not in hf_config.WEIGHTS:
            raise ValueError(
                f"{name}={value!r} is not planned with a pipeline: leave it out, or use data ranks."
            )
    if model_step.checkpointing and layout.schedule == "zero-bubble":
        raise ValueError(
            "The schedule zero-bubble goes back through a stage twice, and recomputed activations "
            "are there once: use 1f1b, or leave recomputation out."
        )


def _check_layers(config: PretrainedConfig, layout: Layout) -> None:
    total, stages = hf_config.text_config(config).num_hidden_layers, layout.pipeline * layout.chunks
    if total % stages:
        each = f", {layout.chunks} on each rank" if layout.chunks > 1 else ""
        raise ValueError(
            f"{total} layers cannot be divided evenly over {stages} stages (pipeline="
            f"{layout.pipeline}{each}): use a divisor of {total // layout.chunks}."
            if total >= stages
            else f"{total} layers are too few for {stages} stages (pipeline={layout.pipeline}{each}"
            "): use fewer stages."
        )


def _check_micro_batches(count: int, layout: Layout) -> None:
    stages, name = layout.pipeline, layout.schedule
    rounds = max(1, count // stages)
    if name == "1f1b" and count < stages:
        raise ValueError(
            f"The schedule 1f1b needs at least as many micro-batches as stages, and there are "
            f"{count} for pipeline={stages}: give accumulation={stages} or more."
        )
    if name in ("interleaved", "zero-bubble") and count % rounds:
        raise ValueError(
            f"The schedule {name} goes in rounds of about {stages} micro-batches, and {count} "
            f"cannot be divided into {rounds} rounds: give a multiple of {stages} as accumulation."
        )


class DecoderStage(nn.Module):
    """Some layers of a decoder, and what is before or after them on the first and the last stage.

    It takes tokens, int64 [examples, tokens], or hidden states [examples, tokens, width], and gives
    hidden states, or the logits [examples, tokens, vocabulary].

    model   of one of `TYPES`; its modules become the stage's own
    index   of this stage, from 0
    stages  how many there are
    local   the step of a data rank, for its precision
    """

    def __init__(self, model: PreTrainedModel, index: int, stages: int, local: ModelStep):
        super().__init__()
        self.first, self.last, self.local = index == 0, index == stages - 1, local
        whole: Any = model.model
        each = len(whole.layers) // stages
        part = slice(index * each, (index + 1) * each)
        body: Any = copy.copy(whole)
        body._modules = dict(whole._modules)
        body.layers = nn.ModuleList(list(whole.layers)[part])
        body.config = _config_of(whole.config, part)
        if not self.first:
            body._modules["embed_tokens"] = None
        if not self.last:
            body.norm = nn.Identity()
        self.body = body
        self.lm_head = model.lm_head if self.last else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        name = "input_ids" if self.first else "inputs_embeds"
        with autocast(self.local, given.device):
            hidden = self.body(**{name: given}, use_cache=False).last_hidden_state
            return hidden if self.lm_head is None else self.lm_head(hidden)

    def get_input_embeddings(self) -> nn.Module | None:
        """The embeddings, which the first stage has."""
        return self.body._modules["embed_tokens"]

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, which the last stage has."""
        return self.lm_head


def _config_of(config: PretrainedConfig, part: slice) -> PretrainedConfig:
    """The configuration for a part of the layers: its lists with an entry for each are cut too."""
    own = copy.copy(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        own.__dict__["layer_types"] = kinds[part]
    return own


def cut_decoder(
    model: PreTrainedModel, layout: Layout, rank: int, local: ModelStep
) -> dict[int, DecoderStage]:
    """{index: stage} of one rank of the pipeline; the model's other layers are left to be freed.

    rank   along the pipeline, from 0; stage s is on rank s % layout.pipeline
    local  the step of a data rank, which `check_pipeline` let pass
    """
    stages = layout.pipeline * layout.chunks
    return {
        index: DecoderStage(model, index, stages, local)
        for index in range(rank, stages, layout.pipeline)
    }


def like_of_stage(
    index: int, stages: int, model_step: ModelStep, local: ModelStep, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what a stage takes, what it gives), of one micro-batch, on torch's meta device.

    Hidden states have the dtype in which FSDP2 computes; with DDP, whose autocast leaves what
    layers add to as it is, that of the weights.
    """
    config: Any = model_step.config
    weights = DTYPES[model_step.weights or "fp32"]
    casts = layout.strategy != "ddp" and model_step.precision in AUTOCAST
    hidden = AUTOCAST[model_step.precision] if casts else weights
    logits = AUTOCAST.get(model_step.precision, weights)
    shape = local.micro_batch, local.tokens or 1

    def like(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, width, dtype=dtype, device="meta", requires_grad=True)

    taken = like(config.hidden_size, hidden)
    if index == 0:
        taken = torch.empty(*shape, dtype=torch.int64, device="meta")
    last = index == stages - 1
    return taken, like(config.vocab_size, logits) if last else like(config.hidden_size, hidden)
