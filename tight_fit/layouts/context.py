"""Context parallelism of any Hugging Face model: ranks divide the tokens of each example.

Each rank holds a part of the tokens of every example, and all layers but attention work on these
alone. The attention is PyTorch's ring (`torch.distributed.tensor.experimental.context_parallel`):
a rank attends to its own keys while it gathers those of the others, then to each of theirs, and
merges the results (Liu, Zaharia and Abbeel 2023, arXiv 2310.01889). It keeps only its own keys for
the backward pass, gathers the others again there, and their gradients travel around the ring, home.

With causal attention each rank has one part from the beginning and one from the end of an example,
so that all have the same work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AttentionInterface

from tight_fit.layouts.torch_private_ranks import put_ring_under_attention
from tight_fit.techniques.step import Batch
from tight_fit.torch_private import FakeTensor

NAME = "ring"  # of the attention, among transformers' own
TOKENS = 2  # the dimension of tokens in [examples, heads, tokens, width]


def split_tokens(model: Any, mesh: DeviceMesh) -> None:
    """Let every attention of a model be a ring over the ranks of `mesh`, in place.

    Raises NotImplementedError among ranks on GPUs, where PyTorch's context manager does it. The
    forward pass raises ValueError for attention with capped scores, with sinks, or with a window
    that is shorter than the text.
    """
    if mesh.device_type != "cpu":
        raise NotImplementedError(
            "Context ranks on GPUs are only planned here: train with "
            "torch.distributed.tensor.experimental.context_parallel."
        )
    put_ring_under_attention()
    ranks = mesh.size()

    def attention(
        module: nn.Module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options
    ):
        window = options.get("sliding_window")
        if window is not None and window >= key.shape[TOKENS] * ranks:
            options["sliding_window"] = None  # every token is in it
        for name in ("sliding_window", "softcap", "s_aux"):
            if options.get(name) is not None:
                raise ValueError(
                    f"Attention with {name} is not planned with context ranks: use data or tensor "
                    "ranks for this model."
                )
        query, key, value = (
            DTensor.from_local(part, mesh, [Shard(TOKENS)], run_check=False)
            for part in (query, key, value)
        )
        result: Any = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=getattr(module, "is_causal", False),
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return result.to_local().transpose(1, 2).contiguous(), None

    # No function for masks goes with it, so that transformers makes none.
    AttentionInterface.register(NAME, attention)
    model.config._attn_implementation = NAME


def is_causal(model: nn.Module) -> bool:
    """Whether tokens attend to earlier ones only.

    Raises ValueError for a model that has attention of both kinds.
    """
    kinds = {bool(part.is_causal) for part in model.modules() if hasattr(part, "is_causal")}
    if len(kinds) > 1:
        raise ValueError(
            "Some layers of this model attend to all tokens and some to earlier ones, which is not "
            "planned with context ranks: use data or tensor ranks."
        )
    return kinds.pop() if kinds else False


def places(rank: int, ranks: int, tokens: int, causal: bool) -> torch.Tensor:
    """The positions of the tokens of a rank, int64 [tokens / ranks].

    One part from the beginning and one from the end of a text with causal attention, else one
    after the other. `tokens` must be a multiple of 2 × ranks.
    """
    if not causal:
        return torch.arange(tokens).chunk(ranks)[rank]
    parts = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[-1 - rank]])


def cut(batch: Batch, mine: torch.Tensor, tokens: int) -> Batch:
    """A context rank's part of a micro-batch, with the positions of its tokens.

    batch   [examples, tokens] each, and labels [examples × tokens], one of each token
    mine    positions of the rank's tokens, int64 (`places`)
    Raises ValueError for a batch with padding, as the ring takes no mask.
    """
    mask = batch.get("attention_mask")
    if mask is not None and not isinstance(mask, FakeTensor) and not mask.all():
        raise ValueError(
            "Context ranks attend to all tokens, and this batch has padding: cut or pack the texts "
            "to one length."
        )
    part = {name: value.view(-1, tokens)[:, mine] for name, value in batch.items()}
    part["labels"] = part["labels"].flatten()
    part["position_ids"] = mine.expand(len(part["input_ids"]), -1).clone()
    return part
