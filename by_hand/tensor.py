"""Tensor parallelism by hand: the matrices of one layer over several ranks, and their messages.

After Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; sequence parallelism:
Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). Every rank runs the same code on its own
slices, which are those of `Tensor.tensor_split`: they differ by at most one row, column, head or
token, and may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from by_hand.exchange import Exchange

Collective = Callable[[Tensor], Tensor]

# What is sent in the forward pass, and what is sent for its gradient


class _Communicate(torch.autograd.Function):
    """One collective in the forward pass, another for the gradient; None stands for no message."""

    @staticmethod
    def forward(
        ctx, tensor: Tensor, forward: Collective | None, backward: Collective | None
    ) -> Tensor:
        ctx.collective = backward
        return tensor.view_as(tensor) if forward is None else forward(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return (gradient if ctx.collective is None else ctx.collective(gradient)), None, None


def f(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Megatron's f: nothing is sent forward, and an all-reduce backward.

    It stands before matrices cut by columns, where each rank's gradient is one term of a sum.
    """
    return _Communicate.apply(tensor, None, exchange.reduce)


def g(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Megatron's g: an all-reduce forward, and nothing is sent backward.

    It stands after matrices cut by rows, where each rank's output is one term of a sum.
    """
    return _Communicate.apply(tensor, exchange.reduce, None)


def gather(tensor: Tensor, exchange: Exchange, total: int, dim: int = 1) -> Tensor:
    """f for slices of `total` tokens: an all-gather forward, a reduce-scatter backward."""
    forward = partial(exchange.gather, dim=dim, total=total)
    backward = partial(exchange.scatter, dim=dim, total=total)
    return _Communicate.apply(tensor, forward, backward)


def scatter(tensor: Tensor, exchange: Exchange, dim: int = 1) -> Tensor:
    """g for slices of the tokens: a reduce-scatter forward, an all-gather backward."""
    total = tensor.shape[dim]
    forward = partial(exchange.scatter, dim=dim, total=total)
    backward = partial(exchange.gather, dim=dim, total=total)
    return _Communicate.apply(tensor, forward, backward)


def cut(tensor: Tensor, exchange: Exchange, dim: int = 1) -> Tensor:
    """This rank's slice of what all ranks have: nothing forward, an all-gather backward."""
    total = tensor.shape[dim]
    forward = partial(exchange.local_slice, dim=dim, total=total)
    backward = partial(exchange.gather, dim=dim, total=total)
    return _Communicate.apply(tensor, forward, backward)


def join(tensor: Tensor, exchange: Exchange, total: int, dim: int = 1) -> Tensor:
    """The slices of all ranks, for what every rank then computes in the same way.

    An all-gather forward; backward nothing is sent.
    """
    forward = partial(exchange.gather, dim=dim, total=total)
    backward = partial(exchange.local_slice, dim=dim, total=total)
    return _Communicate.apply(tensor, forward, backward)


# Matrices


class ColumnParallelLinear(nn.Module):
    """This rank's columns of W in x W + b: rows of torch's weight [out, in], a slice of the bias.

    It sends nothing: call it on f(x), and on the same f(x) where several matrices have one input.

    groups  number of groups of columns that must stay together, such as heads; None: each by itself
    """

    def __init__(self, dense: nn.Linear, exchange: Exchange, groups: int | None = None):
        super().__init__()
        groups = dense.out_features if groups is None else groups
        self.weight = nn.Parameter(_part(dense.weight, exchange, 0, groups))
        self.bias = (
            None if dense.bias is None else nn.Parameter(_part(dense.bias, exchange, 0, groups))
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., this rank's part of out]"""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's rows of W in x W + b, for an x that is itself cut by columns.

    The output is the sum over the ranks; the bias is added once, after the sum.

    groups  number of groups of rows that must stay together, such as heads; None: each by itself
    tokens  number of tokens of all ranks, for sequence parallelism: the sum is left cut along the
            tokens, by a reduce-scatter in place of an all-reduce
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
        """x [examples, tokens, this rank's part of in] -> [examples, tokens, out].

        With `tokens` the result has this rank's tokens only.
        """
        y = F.linear(x, self.weight)
        y = scatter(y, self.exchange) if self.tokens else g(y, self.exchange)
        if self.bias is None:
            return y
        # On a slice of the tokens each rank has one term of the bias's gradient: f sums them.
        return y + (f(self.bias, self.exchange) if self.tokens else self.bias)


class MLP(nn.Module):
    """down(GELU(up(x))): `up` by columns, GELU on each rank's own columns, `down` by rows.

    One all-reduce in the forward pass and one in the backward pass; with `tokens` a gather and a
    scatter in place of each.
    """

    def __init__(
        self, up: nn.Linear, down: nn.Linear, exchange: Exchange, tokens: int | None = None
    ):
        super().__init__()
        self.exchange, self.tokens = exchange, tokens
        self.up = ColumnParallelLinear(up, exchange)
        self.down = RowParallelLinear(down, exchange, tokens=tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(_enter(x, self.exchange, self.tokens))))


class Attention(nn.Module):
    """Self-attention by heads: each rank projects to its own heads, attends and projects back.

    Raises ValueError where the hidden size cannot be divided into `heads`.
    """

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
                f"A hidden size of {query.out_features} cannot be divided into {heads} heads: "
                "choose a number of heads that divides it."
            )
        self.exchange, self.tokens = exchange, tokens
        self.head_size = query.out_features // heads
        self.query, self.key, self.value = (
            ColumnParallelLinear(dense, exchange, heads) for dense in (query, key, value)
        )
        self.output = RowParallelLinear(output, exchange, heads, tokens)

    def forward(self, x: Tensor) -> Tensor:
        x = _enter(x, self.exchange, self.tokens)  # once for query, key and value
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.head_size)).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A ViT layer of transformers (`model.vit.layers[i]`) over the ranks.

    tokens   number of tokens of all ranks, for sequence parallelism: then x is this rank's slice of
             them, [examples, tokens/N, hidden], and so is what LayerNorm, dropout and the residual
             connections keep for the backward pass. None: x is [examples, tokens, hidden]
    dropout  probability
    seed     of the masks: all ranks draw the same ones, but on slices of the tokens each its own
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
        self.exchange, self.tokens, self.dropout = exchange, tokens, dropout
        whole: Any = dense.attention
        projections = (whole.q_proj, whole.k_proj, whole.v_proj, whole.o_proj)
        self.attention = Attention(*projections, whole.num_attention_heads, exchange, tokens)
        mlp: Any = dense.mlp
        self.mlp = MLP(mlp.fc1, mlp.fc2, exchange, tokens)
        self.before, self.after = _copy(dense.layernorm_before), _copy(dense.layernorm_after)
        self.generator = torch.Generator().manual_seed(seed + (exchange.rank if tokens else 0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.apply_dropout(self.attention(self._norm(self.before, x)))
        return x + self.apply_dropout(self.mlp(self._norm(self.after, x)))

    def _norm(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        if not self.tokens:
            return norm(x)
        # On a slice of the tokens each rank has one term of these gradients: f sums them.
        weight, bias = f(norm.weight, self.exchange), f(norm.bias, self.exchange)
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    def apply_dropout(self, x: Tensor) -> Tensor:
        """Dropout from the layer's own generator; the backward pass keeps one byte per element."""
        if not self.dropout or not self.training:
            return x
        drawn = torch.empty(x.shape).bernoulli_(1 - self.dropout, generator=self.generator)
        return x * drawn.to(x.device, torch.bool) / (1 - self.dropout)


def _enter(x: Tensor, exchange: Exchange, tokens: int | None) -> Tensor:
    return gather(x, exchange, tokens) if tokens else f(x, exchange)


def _part(whole: Tensor, exchange: Exchange, dim: int, groups: int) -> Tensor:
    """This rank's groups of a matrix cut into `groups` along `dim`."""
    begin, end = exchange.bounds(groups)
    length = whole.shape[dim] // groups
    return whole.detach().narrow(dim, begin * length, (end - begin) * length).clone()


def _copy(norm: Any) -> nn.LayerNorm:
    copied = nn.LayerNorm(norm.normalized_shape, norm.eps).to(norm.weight)
    copied.load_state_dict(norm.state_dict())
    return copied


# The vocabulary


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of an embedding, one row per word of the vocabulary.

    A rank looks up the words that it has and puts zeros for the others; the sum over the ranks is
    complete.
    """

    def __init__(self, dense: nn.Embedding, exchange: Exchange):
        super().__init__()
        self.exchange = exchange
        self.begin, self.end = exchange.bounds(dense.num_embeddings)
        self.padding = dense.padding_idx
        self.weight = nn.Parameter(_part(dense.weight, exchange, 0, dense.num_embeddings))

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> [..., hidden]"""
        local = (ids >= self.begin) & (ids < self.end)
        if self.begin == self.end:  # more ranks than words: zeros that depend on the weight
            zeros = torch.zeros(*ids.shape, self.weight.shape[1]).to(self.weight)
            vectors = self.weight.sum() + zeros
        else:
            # The row of the padding token gets no gradient.
            learnt = local if self.padding is None else local & (ids != self.padding)
            vectors = F.embedding((ids - self.begin) * local, self.weight)
            vectors = torch.where(learnt[..., None], vectors, vectors.detach()) * local[..., None]
        return g(vectors, self.exchange)


class _CrossEntropy(torch.autograd.Function):
    """One loss per label, where each rank has the logits of its own words, from word `begin` on."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, begin: int, exchange: Exchange) -> Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        words = scores.shape[-1]  # 0 on a rank without words
        nothing = torch.full(labels.shape, -math.inf).to(scores)
        highest = exchange.reduce(scores.amax(-1) if words else nothing, op="max")
        scores = scores - highest[..., None]
        local = (labels >= begin) & (labels < begin + words)
        column = ((labels - begin) * local)[..., None]  # of the label, among this rank's words
        if words:
            of_label = scores.gather(-1, column)[..., 0] * local
        else:
            of_label = torch.zeros_like(nothing)
        scores.exp_()
        total, of_label = exchange.reduce(torch.stack([scores.sum(-1), of_label]))
        probabilities = scores.div_(total[..., None])
        ctx.save_for_backward(probabilities, local, column)
        ctx.dtype = logits.dtype
        return total.log() - of_label

    @staticmethod
    def backward(ctx, gradient: Tensor):
        probabilities, local, column = ctx.saved_tensors
        if probabilities.shape[-1]:
            correct = local[..., None].to(probabilities)
            probabilities = probabilities.scatter_add(-1, column, -correct)
        return (probabilities * gradient[..., None]).to(ctx.dtype), None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: int, exchange: Exchange, ignore_index: int = -100
) -> Tensor:
    """`F.cross_entropy` where each rank has the logits of its own words.

    It is the mean over the labels that are not `ignore_index`. Three numbers per label go through
    all-reduces, whatever the size of the vocabulary; in the backward pass nothing is sent.

    logits      [..., this rank's words], as `ColumnParallelLinear` returns them
    labels      int64 [...], the same on all ranks
    vocabulary  number of words of all ranks
    Returns a scalar, fp32 (fp64 for fp64). Raises ValueError for a label that is no word, and for
    logits of another number of words than this rank has.
    """
    begin, end = exchange.bounds(vocabulary)
    if logits.shape[-1] != end - begin:
        raise ValueError(
            f"Rank {exchange.rank} holds {end - begin} of {vocabulary} words, and was given logits "
            f"of {logits.shape[-1]}: pass the logits of its own words."
        )
    counted = labels != ignore_index
    if ((labels < 0) | (labels >= vocabulary))[counted].any():
        raise ValueError(
            f"A label is no word: labels go from 0 to {vocabulary - 1}, or are {ignore_index} to "
            "be ignored."
        )
    losses = _CrossEntropy.apply(logits, labels, begin, exchange)
    return torch.where(counted, losses, 0).sum() / counted.sum()
