"""The logarithms of the probabilities of tokens, a chunk of tokens at a time.

DPO and GRPO do not add up cross entropies: what a token's logarithm counts for is known only when
all of them are there. So nothing but one number per token stays of the forward pass, and the
backward pass makes the logits of each chunk again: one product with the output layer more than
`techniques.chunked_loss`, whose gradient is known beforehand.
"""

from __future__ import annotations

import torch

# The fewest tokens of a chunk. Each chunk reads the whole output layer, which on an A100 or an H100
# takes longer than its products in 16 bits below about 200 to 300 tokens.
LEAST = 256
IGNORED = -100  # the label that counts for nothing, as in torch.nn.functional.cross_entropy


class ChunkedLogProbs(torch.autograd.Function):
    """The logarithm of each label's probability, fp32 [tokens]; 0 where the label is `IGNORED`.

    hidden [tokens, width], weight [words, width], bias [words] or None, labels int64 [tokens].
    Products are in autocast's dtype where it is on, else in that of `hidden`; the rest is fp32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels):
        device, ctx.dtype = hidden.device.type, hidden.dtype
        if torch.is_autocast_enabled(device):
            ctx.dtype = torch.get_autocast_dtype(device)
        norms = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        found = torch.empty_like(norms)
        with torch.autocast(device, enabled=False):
            low = weight.to(ctx.dtype)
            for part in chunks(hidden, weight):
                logits = _logits(hidden[part].to(ctx.dtype), low, bias)
                norms[part] = logits.logsumexp(-1, keepdim=True)
                found[part] = logits.gather(1, labels[part, None].clamp(min=0))
                del logits
        ctx.save_for_backward(hidden, weight, bias, labels, norms)
        return found.sub_(norms).squeeze(1).mul_(labels != IGNORED)

    @staticmethod
    def backward(ctx, scale):
        hidden, weight, bias, labels, norms = ctx.saved_tensors
        for_hidden, for_weight, for_bias = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad)
        )
        with torch.autocast(hidden.device.type, enabled=False):
            low, scale = weight.to(ctx.dtype), (scale * (labels != IGNORED))[:, None]
            for part in chunks(hidden, weight):
                x = hidden[part].to(ctx.dtype)
                # By the logits: 1 at the label, minus softmax(logits).
                gradient = _logits(x, low, bias).sub_(norms[part]).exp_().mul_(-scale[part])
                gradient.scatter_add_(1, labels[part, None].clamp(min=0), scale[part])
                if for_bias is not None:
                    for_bias += gradient.sum(0)
                gradient = gradient.to(ctx.dtype)
                if for_hidden is not None:
                    for_hidden[part] = gradient @ low
                if for_weight is not None:
                    for_weight += gradient.T @ x
                del gradient, x
        return for_hidden, for_weight, for_bias, None


def _logits(x: torch.Tensor, low: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    logits = (x @ low.T).float()
    return logits if bias is None else logits.add_(bias)


def chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """The chunks of hidden states [tokens, width] before an output layer [words, width]."""
    size = tokens_in_chunk(len(hidden), *weight.shape)
    return [slice(begin, begin + size) for begin in range(0, len(hidden), size)]


def tokens_in_chunk(tokens: int, words: int, width: int) -> int:
    """Tokens of a chunk: so many that its logits have about as many numbers as all hidden states.

    The number of chunks is a power of two, so that it divides the usual numbers of tokens; but a
    chunk has at least `LEAST` tokens, or all of them.
    """
    chunks = 1 << max(0, -(-words // width) - 1).bit_length()
    return min(tokens, max(LEAST, -(-tokens // chunks)))
