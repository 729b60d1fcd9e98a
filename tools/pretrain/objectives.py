"""Two ways to learn from text without labels, and their sum.

* masked language model (Devlin et al., 2019): 15 % of the tokens are hidden, and the model guesses
  them.
* contrastive: two crops of one document must find each other by their [CLS] vectors among the
  crops of the whole batch (InfoNCE: van den Oord et al., 2018; crops as in Izacard et al.,
  "Contriever", 2021).

Shapes: `rows` is a matrix (R, L) of int64 token ids with an even R; rows 2i and 2i+1 are crops of
one document. Losses are float32 scalars.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import DebertaV2ForMaskedLM

PAD, CLS, SEP, UNK, MASK = range(5)
MASK_SHARE = 0.15
TEMPERATURE = 0.1


def mask(rows: Tensor, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(rows with 15 % of the ordinary tokens hidden, mask of these tokens), both (R, L).

    Of the hidden tokens, 80 % become [MASK], 10 % another token, and 10 % stay.
    """
    chosen = (torch.rand(rows.shape, generator=generator) < MASK_SHARE) & (rows > MASK)
    fate = torch.rand(rows.shape, generator=generator)
    other = torch.randint(MASK + 1, vocabulary, rows.shape, generator=generator)
    hidden = torch.where(chosen & (fate < 0.8), MASK, rows)
    return torch.where(chosen & (fate >= 0.9), other, hidden), chosen


def info_nce(vectors: Tensor) -> Tensor:
    """Cross entropy of finding row i's partner (i xor 1) among all other rows by cosine."""
    unit = normalize(vectors, dim=-1)
    alike = unit @ unit.T / TEMPERATURE
    alike = alike.masked_fill(torch.eye(len(unit), dtype=torch.bool), float("-inf"))
    return cross_entropy(alike, torch.arange(len(unit)) ^ 1)


def losses(
    model: DebertaV2ForMaskedLM, rows: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Losses by name, of rows (R, L) int64; training minimises their sum."""
    inputs, chosen = mask(rows, model.config.vocab_size, generator)
    states = model.deberta(inputs, attention_mask=rows != PAD)[0]
    # The head runs only on the hidden tokens, which is a seventh of the work.
    guesses = model.cls(states[chosen])
    return {"mlm": cross_entropy(guesses, rows[chosen]), "contrastive": info_nce(states[:, 0])}
