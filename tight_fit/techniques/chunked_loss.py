"""Cross entropy over a large vocabulary, a chunk of tokens at a time.

The logits of a step take tokens × vocabulary numbers, several times: in the dtype of the weights,
in fp32, and as their gradient. At 8,192 tokens and 128,256 words one copy in fp32 takes 3.9 GiB.
Here the logits of a chunk are made, turned into their own gradient, and forgotten, before those of
the next chunk are made. Only the gradient of the hidden states stays, and that of the head where it
trains. This is possible because nothing comes after the loss: its gradient is known beforehand, up
to a factor.

Where something does come after, as in DPO, the logarithms of the probabilities are made in chunks
(`techniques.log_probs`).

The same idea is in Liger Kernel (Hsu et al. 2024, https://arxiv.org/abs/2410.10989), which computes
each chunk by one Triton kernel on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from tight_fit.techniques.log_probs import IGNORED, ChunkedLogProbs, tokens_in_chunk


class ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of tokens; its gradients are made in the forward pass.

    hidden [tokens, width], weight [words, width], bias [words] or None, labels int64 [tokens].
    Products are in autocast's dtype where it is on, else in that of `hidden`; the rest is fp32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels):
        device, dtype = hidden.device.type, hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        for_hidden, for_weight, for_bias = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad)
        )
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(device, enabled=False):
            low = weight.to(dtype)
            chunk = tokens_in_chunk(len(hidden), *weight.shape)
            for begin in range(0, len(hidden), chunk):
                part = slice(begin, begin + chunk)
                x, wanted = hidden[part].to(dtype), labels[part, None]
                logits = (x @ low.T).float()
                if bias is not None:
                    logits += bias
                counts = wanted != IGNORED
                wanted = wanted.clamp(min=0)
                norm = logits.logsumexp(-1, keepdim=True)
                total += ((norm - logits.gather(1, wanted)) * counts).sum()
                # The gradient by the logits: softmax(logits), minus 1 at the label.
                gradient = logits.sub_(norm).exp_()
                gradient.scatter_add_(1, wanted, -torch.ones_like(norm)).mul_(counts)
                if for_bias is not None:
                    for_bias += gradient.sum(0)
                gradient = gradient.to(dtype)
                if for_hidden is not None:
                    for_hidden[part] = gradient @ low
                if for_weight is not None:
                    for_weight += gradient.T @ x
                del logits, gradient
        ctx.gradients = for_hidden, for_weight, for_bias
        return total

    @staticmethod
    def backward(ctx, scale):
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if part is None else part.mul_(scale) for part in gradients), None


class HeadInChunks(nn.Module):
    """In the place of a language model's output layer: hands on the hidden states.

    It holds the parameters of that layer under their names, and computes the loss from both.

    always  True: also while the model does not train
    """

    def __init__(self, head: nn.Linear, always: bool = False):
        super().__init__()
        self.weight, self.bias, self.always = head.weight, head.bias, always
        self._given: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., width], unchanged; while the model does not train, its logits."""
        if not (self.training or self.always):
            return F.linear(hidden, self.weight, self.bias)
        self._given = hidden
        return hidden

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the cross entropies, an fp32 scalar.

        logits  what the model gave as its logits, which are the hidden states [..., width]
        labels  int64 with one label per hidden state; -100 counts for nothing
        Raises ValueError where the model changed its logits after the output layer.
        """
        self._check(logits)
        return ChunkedCrossEntropy.apply(
            logits.flatten(0, -2), self.weight, self.bias, labels.flatten()
        )

    def log_probs(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The logarithm of each label's probability, fp32 [labels]; `loss_sum` has the arguments.

        It is 0 for labels of -100. Raises ValueError as `loss_sum` does.
        """
        self._check(logits)
        return ChunkedLogProbs.apply(
            logits.flatten(0, -2), self.weight, self.bias, labels.flatten()
        )

    def _check(self, logits: torch.Tensor) -> None:
        given, self._given = self._given, None
        if logits is not given:
            raise ValueError(
                "loss='chunked' needs logits that come from the output layer as they are, and this "
                "model changes them afterwards (soft caps, a factor, or a slice): use loss='full'."
            )


def put_in_chunks(model: PreTrainedModel, always: bool = False) -> HeadInChunks:
    """Replace the output layer of a language model by its `HeadInChunks`, in place.

    Raises ValueError for a model without such a layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            "loss='chunked' is for language models, whose output layer has a row for each word of "
            f"the vocabulary, and {type(model).__name__} has none: use loss='full'."
        )
    chunks = HeadInChunks(head, always)
    name = next(name for name, module in model.named_modules() if module is head)
    model.set_submodule(name, chunks)
    return chunks
