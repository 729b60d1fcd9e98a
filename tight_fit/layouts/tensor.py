"""Tensor parallelism of any decoder that is built as Llama is, by torch's own parallel styles.

As torchtitan does it (`parallelize_llama.py`): heads and hidden units are divided over the ranks
(Shoeybi et al. 2019), norms and residual connections work on a part of the tokens each (sequence
parallelism, Korthikanti et al. 2022), and the vocabulary is divided for embeddings and head, whose
logits stay divided in the loss (`loss_parallel`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

TOKENS = Shard(1)  # of [examples, tokens, hidden]
COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # of Qwen3, for each head by itself
HEADS = 2  # the dimension of heads in [examples, tokens, heads, width]
EXPECTED = {*COLUMNS, *ROWS, *NORMS, "self_attn", "mlp", "mlp.act_fn"}


def split_decoder(model: Any, mesh: DeviceMesh, length: int) -> None:
    """Split a causal language model over the ranks of `mesh`, in place. Every rank passes the same
    weights and keeps its slices; nothing is sent.

    length  tokens per example, which norms and residual connections divide
    Raises ValueError for a model that is built otherwise, and for heads, hidden units, a vocabulary
    or tokens that the ranks do not divide.
    """
    check_decoder(model, mesh.size(), length)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=TOKENS, use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=TOKENS, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for index, layer in enumerate(model.model.layers):
        plan |= {f"model.layers.{index}.{name}": style for name, style in _layer(layer).items()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if tied:  # both are divided by the words of the vocabulary
        model.lm_head.weight = model.model.embed_tokens.weight


def _layer(layer: nn.Module) -> dict[str, ParallelStyle]:
    states: list[dict[str, Placement]] = [{"hidden_states": TOKENS}, {"hidden_states": Replicate()}]
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=states[0], desired_input_kwarg_layouts=states[1]
        ),
        "mlp": PrepareModuleInput(input_layouts=(TOKENS,), desired_input_layouts=(Replicate(),)),
    }
    plan |= {name: SequenceParallel() for name in NORMS}
    plan |= {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=TOKENS, use_local_output=False) for name in ROWS}
    there = dict(layer.named_modules())
    plan |= {
        name: SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        for name in HEAD_NORMS
        if name in there
    }
    return plan


def check_decoder(model: Any, ranks: int, length: int) -> None:
    """Raises ValueError, in one sentence, where a model cannot be divided over so many ranks."""
    config: Any = model.config
    layers = getattr(getattr(model, "model", None), "layers", None) or ()
    names = {name for layer in layers for name, _ in layer.named_modules() if name}
    extra = names - EXPECTED - set(HEAD_NORMS)
    if not layers or not hasattr(model, "lm_head") or EXPECTED - names or extra:
        raise ValueError(
            f"Tensor parallelism is planned for language models with Llama's layers, such as "
            f"Llama, Mistral, Qwen2 and Qwen3, not for {type(model).__name__}: leave tensor out."
        )
    for what, count in (
        ("attention heads", config.num_attention_heads),
        ("key and value heads", config.num_key_value_heads),
        ("hidden units", config.intermediate_size),
        ("words of the vocabulary", config.vocab_size),
        ("tokens", length),
    ):
        if count % ranks:
            raise ValueError(
                f"{count} {what} cannot be divided by tensor={ranks} ranks: use a divisor of "
                f"{count}."
            )
