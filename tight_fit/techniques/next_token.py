"""The cross entropy of classes and of next tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tight_fit.checks import IGNORE


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of logits [labels, classes], or [examples, tokens, vocabulary].

    labels  int64 [labels]; or [examples, tokens], the tokens themselves (`next_tokens`)
    """
    if labels.dim() == 2:
        logits, labels = logits.flatten(0, -2), next_tokens(labels)
    return F.cross_entropy(logits, labels, reduction="sum")


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Labels [labels] as they are; of tokens, [examples, tokens], each that of the next token.

    The logits of a token predict the next one: the labels move one to the left here, as in
    transformers. So the logits, which are far larger, need not be copied.
    """
    return labels if labels.dim() != 2 else F.pad(labels[:, 1:], (0, 1), value=IGNORE).flatten()
