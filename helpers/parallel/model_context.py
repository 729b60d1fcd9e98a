"""Context parallelism of any Hugging Face model, as far as a plan needs it: by shapes.

Each rank holds a part of the tokens of every example. All layers but attention work on their own
tokens; in the attention a rank gathers keys and values of all tokens, and the backward pass sums
their gradients and scatters them, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2). With
causal attention each rank takes one part from the beginning and one from the end of an example, so
that all have the same work, half of that without a mask. A plan counts that work and these
messages. It does not follow which tokens a rank has, so that nothing here can train: torch's
`torch.distributed.tensor.experimental.context_parallel` does.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from helpers.torch_private import all_gather_with_gradient

NAME = "gathered"  # of the attention, among transformers' own
TOKENS = 2  # the dimension of tokens in [examples, heads, tokens, width]


def gather_in_attention(model: Any, mesh: DeviceMesh) -> None:
    """Let every attention of a model gather keys and values over the ranks of `mesh`, in place.

    Raises NotImplementedError among real ranks, where it would train something else. The forward
    pass raises ValueError for attention with capped scores, with sinks, or with a window that is
    shorter than the text.
    """
    group = mesh.get_group()
    if dist.get_backend(group) != "fake":
        raise NotImplementedError(
            "Context parallelism is only planned here: train with "
            "torch.distributed.tensor.experimental.context_parallel."
        )

    def attention(
        module: nn.Module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options
    ):
        key, value = (all_gather_with_gradient(part, TOKENS, group) for part in (key, value))
        window = options.get("sliding_window")
        if window is not None and window >= key.shape[TOKENS]:
            options["sliding_window"] = None  # every token is in it
        for name in ("sliding_window", "softcap", "s_aux"):
            if options.get(name) is not None:
                raise ValueError(
                    f"Attention with {name} is not planned with context ranks: use data or tensor "
                    "ranks for this model."
                )
        result = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=getattr(module, "is_causal", False),
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return result.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.config._attn_implementation = NAME
