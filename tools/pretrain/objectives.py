"""Three ways to learn from text without labels, and their sums.

* `mlm`: masked language model (Devlin et al., 2019). 15 % of the tokens are hidden, and the model
  guesses them.
* `rtd`: replaced-token detection (Clark et al., "ELECTRA", 2020; He et al., "DeBERTaV3", 2021). A
  small generator fills the masks, and the model says of every token whether it was replaced.
  Embeddings are not shared ("NES" in DeBERTaV3).
* `contrastive`: two crops of one document must find each other by their [CLS] vectors among the
  crops of the whole batch (InfoNCE: van den Oord et al., 2018; crops as in Izacard et al.,
  "Contriever", 2021).

Shapes: `rows` is a matrix (R, L) of int64 token ids with an even R; rows 2i and 2i+1 are crops of
one document. Losses are float32 scalars.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

PAD, CLS, SEP, UNK, MASK = range(5)
NAMES = ("mlm", "rtd", "contrastive")
MASK_SHARE = 0.15
TEMPERATURE = 0.1
RTD_WEIGHT = 50.0  # ELECTRA's


def mask(rows: Tensor, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(rows with 15 % of the ordinary tokens hidden, mask of these tokens), both (R, L).

    Of the hidden tokens, 80 % become [MASK], 10 % another token, and 10 % stay.
    """
    chosen = (torch.rand(rows.shape, generator=generator) < MASK_SHARE) & (rows > MASK)
    fate = torch.rand(rows.shape, generator=generator)
    other = torch.randint(MASK + 1, vocabulary, rows.shape, generator=generator)
    hidden = torch.where(chosen & (fate < 0.8), MASK, rows)
    return torch.where(chosen & (fate >= 0.9), other, hidden), chosen


def guess(model: DebertaV2ForMaskedLM, states: Tensor, chosen: Tensor) -> Tensor:
    """Logits (hidden tokens, vocabulary) of the library's own head.

    The head runs only on the hidden tokens, which is a seventh of the work.
    """
    return model.cls(states[chosen])


def info_nce(vectors: Tensor) -> Tensor:
    """Cross entropy of finding row i's partner (i xor 1) among all other rows by cosine."""
    unit = normalize(vectors, dim=-1)
    alike = unit @ unit.T / TEMPERATURE
    alike = alike.masked_fill(torch.eye(len(unit), dtype=torch.bool), float("-inf"))
    return cross_entropy(alike, torch.arange(len(unit)) ^ 1)


class Pretrainer(nn.Module):
    """The model that is kept (`model`) and what is thrown away after pretraining.

    `objective`: names joined by a plus sign, losses added. Raises ValueError for an unknown name.
    """

    def __init__(self, config: DebertaV2Config, objective: str):
        super().__init__()
        self.parts = objective.split("+")
        if not set(self.parts) <= set(NAMES):
            raise ValueError(
                f"Unknown objective {objective!r}: join some of {', '.join(NAMES)} with a +."
            )
        self.model = DebertaV2ForMaskedLM(config)
        if "rtd" in self.parts:
            changed = {"num_hidden_layers": 1, "intermediate_size": config.hidden_size}
            small = DebertaV2Config(**config.to_dict() | changed)
            self.generator = DebertaV2ForMaskedLM(small)
            self.detector = nn.Linear(config.hidden_size, 1)

    def forward(self, rows: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Losses by name, of rows (R, L) int64; training minimises their sum."""
        real = rows != PAD
        inputs = rows
        if {"mlm", "rtd"} & set(self.parts):
            inputs, chosen = mask(rows, self.model.config.vocab_size, generator)
        losses = {}
        if "rtd" in self.parts:
            logits = guess(
                self.generator, self.generator.deberta(inputs, attention_mask=real)[0], chosen
            )
            losses["generator"] = cross_entropy(logits, rows[chosen])
            noise = torch.rand(logits.shape, generator=generator).clamp_min(1e-9)
            # The Gumbel-max trick: this draws from the softmax of the logits.
            drawn = (logits.detach() - (-noise.log()).log()).argmax(-1)
            inputs = rows.clone()
            inputs[chosen] = drawn
        states = self.model.deberta(inputs, attention_mask=real)[0]
        if "mlm" in self.parts:
            losses["mlm"] = cross_entropy(guess(self.model, states, chosen), rows[chosen])
        if "rtd" in self.parts:
            replaced = (inputs != rows).float()
            losses["rtd"] = RTD_WEIGHT * binary_cross_entropy_with_logits(
                self.detector(states)[..., 0][real], replaced[real]
            )
        if "contrastive" in self.parts:
            losses["contrastive"] = info_nce(states[:, 0])
        return losses
