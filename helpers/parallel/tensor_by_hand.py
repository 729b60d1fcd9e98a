"""Tensor parallelism by hand: one layer's matrices over several ranks, and the messages that this takes.

After Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; sequence parallelism: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198). Every rank runs the same code on its own slices. Slices are those of
`Tensor.tensor_split`: they differ by at most one row, column, head or token, and may be empty.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.parallel.exchange import Exchange

# ---- what is sent, and what is sent back for its gradient -------------------------------------------------------------


class _Send(torch.autograd.Function):
    """One way forward, another way for the gradient: names of methods of `Exchange`, or None for neither. `total` is the
    whole length of `dim`."""

    @staticmethod
    def forward(
        ctx,
        tensor: Tensor,
        exchange: Exchange,
        there: str | None,
        back: str | None,
        dim: int,
        total: int,
    ):
        ctx.exchange, ctx.back, ctx.where = exchange, back, (dim, total)
        return (
            tensor.view_as(tensor)
            if there is None
            else getattr(exchange, there)(tensor, dim, total)
        )

    @staticmethod
    def backward(ctx, gradient: Tensor):
        out = (
            gradient if ctx.back is None else getattr(ctx.exchange, ctx.back)(gradient, *ctx.where)
        )
        return out, None, None, None, None, None


def f(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Megatron's f: forward nothing, backward an all-reduce. Before columns: each rank's part of the gradient is a term of
    a sum."""
    return _Send.apply(tensor, exchange, None, "reduce", 0, 0)


def g(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Megatron's g: forward an all-reduce, backward nothing. After rows: each rank's output is a term of a sum."""
    return _Send.apply(tensor, exchange, "reduce", None, 0, 0)


def gather(tensor: Tensor, exchange: Exchange, total: int, dim: int = 1) -> Tensor:
    """f for slices of `total` tokens: forward an all-gather, backward a reduce-scatter."""
    return _Send.apply(tensor, exchange, "gather", "scatter", dim, total)


def scatter(tensor: Tensor, exchange: Exchange, dim: int = 1) -> Tensor:
    """g for slices of the tokens: forward a reduce-scatter, backward an all-gather."""
    return _Send.apply(tensor, exchange, "scatter", "gather", dim, tensor.shape[dim])


def cut(tensor: Tensor, exchange: Exchange, dim: int = 1) -> Tensor:
    """This rank's slice of what all ranks have alike: forward nothing is sent, backward an all-gather."""
    return _Send.apply(tensor, exchange, "mine", "gather", dim, tensor.shape[dim])


def join(tensor: Tensor, exchange: Exchange, total: int, dim: int = 1) -> Tensor:
    """All slices, for what every rank then computes alike: forward an all-gather, backward nothing is sent."""
    return _Send.apply(tensor, exchange, "gather", "mine", dim, total)


# ---- matrices ---------------------------------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Module):
    """This rank's columns of x W: rows of torch's weight [out, in], a slice of the bias. Sends nothing: call it on f(x),
    and on one f(x) where several matrices have the same input.

    groups  columns that must stay together count as one (heads)
    """

    def __init__(self, dense: nn.Linear, exchange: Exchange, groups: int | None = None):
        super().__init__()
        groups = dense.out_features if groups is None else groups
        self.weight = nn.Parameter(_part(dense.weight, exchange, 0, groups))
        self.bias = (
            None if dense.bias is None else nn.Parameter(_part(dense.bias, exchange, 0, groups))
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., this rank's out]"""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's rows of W in x W, for an x that is itself cut by columns: the sum over the ranks is the output. The bias
    is added once, after the sum.

    tokens  how many there are in all, for sequence parallelism: the sum is left cut along them, a reduce-scatter in place of
            an all-reduce
    """

    def __init__(
        self,
        dense: nn.Linear,
        exchange: Exchange,
        groups: int | None = None,
        tokens: int | None = None,
    ):
        super().__init__()
        self.exchange, self.tokens = exchange, tokens
        self.weight = nn.Parameter(
            _part(dense.weight, exchange, 1, dense.in_features if groups is None else groups)
        )
        self.bias = None if dense.bias is None else nn.Parameter(dense.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, this rank's in] -> [rows, tokens, out], or [rows, this rank's tokens, out] with `tokens`"""
        y = F.linear(x, self.weight)
        y = scatter(y, self.exchange) if self.tokens else g(y, self.exchange)
        if self.bias is None:
            return y
        return y + (
            f(self.bias, self.exchange) if self.tokens else self.bias
        )  # it meets this rank's tokens only


class MLP(nn.Module):
    """down(GELU(up(x))): up by columns, GELU on each rank's own columns, down by rows. Two messages, one each way."""

    def __init__(
        self, up: nn.Linear, down: nn.Linear, exchange: Exchange, tokens: int | None = None
    ):
        super().__init__()
        self.exchange, self.tokens = exchange, tokens
        self.up, self.down = (
            ColumnParallelLinear(up, exchange),
            RowParallelLinear(down, exchange, tokens=tokens),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(_enter(x, self.exchange, self.tokens))))


class Attention(nn.Module):
    """Self-attention by heads: each rank projects to its own heads, attends in them and projects back its share."""

    def __init__(
        self,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
        output: nn.Linear,
        heads: int,
        exchange: Exchange,
        tokens: int | None = None,
    ):
        super().__init__()
        if query.out_features % heads:
            raise ValueError(
                f"A width of {query.out_features} cannot be divided into {heads} heads."
            )
        self.exchange, self.tokens, self.width = exchange, tokens, query.out_features // heads
        self.query, self.key, self.value = (
            ColumnParallelLinear(dense, exchange, heads) for dense in (query, key, value)
        )
        self.output = RowParallelLinear(output, exchange, heads, tokens)

    def forward(self, x: Tensor) -> Tensor:
        x = _enter(x, self.exchange, self.tokens)  # once for the three of them
        q, k, v = (
            part(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.width)).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A ViT layer of transformers (`model.vit.layers[i]`) over the ranks.

    tokens   how many there are in all, for sequence parallelism: then x is this rank's slice of them, [rows, tokens/N,
             hidden], and so is what LayerNorm, dropout and the residual keep for the backward pass
    dropout  probability; masks are drawn from `seed`: the same on all ranks, but on slices of the tokens each rank its own
    """

    def __init__(
        self,
        dense: nn.Module,
        exchange: Exchange,
        tokens: int | None = None,
        dropout: float = 0.0,
        seed: int = 0,
    ):
        super().__init__()
        a, m, heads = dense.attention, dense.mlp, dense.attention.num_attention_heads
        self.exchange, self.tokens, self.dropout = exchange, tokens, dropout
        self.attention = Attention(a.q_proj, a.k_proj, a.v_proj, a.o_proj, heads, exchange, tokens)
        self.mlp = MLP(m.fc1, m.fc2, exchange, tokens)
        self.before, self.after = (
            _same(norm) for norm in (dense.layernorm_before, dense.layernorm_after)
        )
        self.generator = torch.Generator().manual_seed(seed + (exchange.rank if tokens else 0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self.attention(self._norm(self.before, x)))
        return x + self._drop(self.mlp(self._norm(self.after, x)))

    def _norm(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        # On a slice of the tokens each rank has a part of the weight's gradient: f sums the parts.
        weight, bias = (
            (f(p, self.exchange) if self.tokens else p) for p in (norm.weight, norm.bias)
        )
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    def _drop(self, x: Tensor) -> Tensor:
        if not self.dropout or not self.training:
            return x
        keep = (
            torch.empty(x.shape)
            .bernoulli_(1 - self.dropout, generator=self.generator)
            .to(x.device, torch.bool)
        )  # a byte each is kept
        return x * keep / (1 - self.dropout)


def _enter(x: Tensor, exchange: Exchange, tokens: int | None) -> Tensor:
    return gather(x, exchange, tokens) if tokens else f(x, exchange)


def _part(whole: Tensor, exchange: Exchange, dim: int, groups: int) -> Tensor:
    """This rank's groups of a matrix cut into `groups` along `dim`."""
    begin, end = exchange.bounds(groups)
    width = whole.shape[dim] // groups
    return whole.detach().narrow(dim, begin * width, (end - begin) * width).clone()


def _same(norm: nn.LayerNorm) -> nn.LayerNorm:
    copied = nn.LayerNorm(norm.normalized_shape, norm.eps).to(norm.weight)
    copied.load_state_dict(norm.state_dict())
    return copied


# ---- the vocabulary ---------------------------------------------------------------------------------------------------


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of an embedding: it looks up what it has, puts zeros for the rest, and the sum is complete."""

    def __init__(self, dense: nn.Embedding, exchange: Exchange):
        super().__init__()
        self.exchange = exchange
        self.begin, self.end = exchange.bounds(dense.num_embeddings)
        self.padding = dense.padding_idx
        self.weight = nn.Parameter(_part(dense.weight, exchange, 0, dense.num_embeddings))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden]"""
        mine = (ids >= self.begin) & (ids < self.end)
        if self.begin == self.end:  # more ranks than words
            found = self.weight.sum() + torch.zeros(*ids.shape, self.weight.shape[1]).to(
                self.weight
            )
        else:
            learnt = (
                mine if self.padding is None else mine & (ids != self.padding)
            )  # its row gets no gradient
            found = F.embedding((ids - self.begin) * mine, self.weight)
            found = torch.where(learnt[..., None], found, found.detach()) * mine[..., None]
        return g(found, self.exchange)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, begin: int, exchange: Exchange) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        empty = torch.full(labels.shape, -math.inf).to(wide)  # a rank without a word
        wide = (
            wide - exchange.reduce(wide.amax(-1) if wide.shape[-1] else empty, op="max")[..., None]
        )
        mine = (labels >= begin) & (labels < begin + wide.shape[-1])
        place = ((labels - begin) * mine)[..., None]
        said = wide.gather(-1, place)[..., 0] * mine if wide.shape[-1] else torch.zeros_like(empty)
        wide.exp_()
        total, said = exchange.reduce(torch.stack([wide.sum(-1), said]))
        ctx.save_for_backward(wide.div_(total[..., None]), mine, place)
        ctx.dtype = logits.dtype
        return total.log() - said

    @staticmethod
    def backward(ctx, gradient: Tensor):
        wide, mine, place = ctx.saved_tensors
        if wide.shape[-1]:
            wide = wide.scatter_add(-1, place, -mine[..., None].to(wide))
        return (wide * gradient[..., None]).to(ctx.dtype), None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: int, exchange: Exchange, ignore_index: int = -100
) -> Tensor:
    """`F.cross_entropy`, the mean over the labels that are not `ignore_index`, where each rank has the logits of its own
    words. Three numbers a label go through all-reduces, whatever the vocabulary; backward nothing is sent.

    logits  [..., this rank's words], the slices of `vocabulary` that `Columns` makes
    labels  int64 [...], the same on all ranks
    Returns a scalar, fp32 (fp64 for fp64). Raises ValueError for a label that is no word, and for logits of another width.
    """
    begin, end = exchange.bounds(vocabulary)
    if logits.shape[-1] != end - begin:
        raise ValueError(
            f"Rank {exchange.rank} holds {end - begin} of {vocabulary} words, and its logits are "
            f"{logits.shape[-1]} wide."
        )
    keep = labels != ignore_index
    if ((labels < 0) | (labels >= vocabulary))[keep].any():
        raise ValueError(
            f"A label is no word: labels go from 0 to {vocabulary - 1}, or are {ignore_index} to be ignored."
        )
    losses = _CrossEntropy.apply(logits, labels, begin, exchange)
    return torch.where(keep, losses, 0).sum() / keep.sum()
