"""A warm start for the word embeddings: latent semantic analysis of the pretraining corpus.

Deerwester et al., "Indexing by Latent Semantic Analysis" (1990): the singular vectors of the
token-by-document matrix put tokens that occur in the same documents close together. This takes
seconds and needs no label. It spares a transformer of this size the long first part of training in
which it learns little but word frequencies.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PretrainedConfig


def embeddings(documents: list[np.ndarray], config: PretrainedConfig, seed: int) -> torch.Tensor:
    """Embeddings (vocab_size, hidden_size) float32 of standard deviation `initializer_range`.

    documents  the token ids of each document
    config     of the model, which has these three
    The entries of the matrix are log(1 + count) times the logarithm of the inverse document
    frequency, with documents scaled to length 1. The result is the same on every run with one
    thread.
    """
    vocabulary, width, spread = config.vocab_size, config.hidden_size, config.initializer_range
    counts = [np.unique(ids, return_counts=True) for ids in documents]
    column = np.concatenate([tokens for tokens, _ in counts])
    row = np.repeat(np.arange(len(counts)), [len(tokens) for tokens, _ in counts])
    rarity = np.log(len(counts) / np.maximum(1, np.bincount(column, minlength=vocabulary)))
    value = np.log1p(np.concatenate([n for _, n in counts])) * rarity[column]
    value /= np.sqrt(np.bincount(row, value**2))[row] + 1e-9
    indices, shape = torch.from_numpy(np.stack([row, column])), (len(counts), vocabulary)
    weights = torch.sparse_coo_tensor(
        indices, torch.from_numpy(value).float(), shape, is_coalesced=True, check_invariants=False
    )
    torch.manual_seed(seed)
    _, strength, vectors = torch.svd_lowrank(weights, q=width, niter=4)
    vectors = vectors * strength.sqrt()
    empty = (
        torch.randn(vocabulary, width) * vectors.std() * (vectors.norm(dim=1, keepdim=True) < 1e-6)
    )
    vectors = vectors + empty
    return vectors / vectors.norm(dim=1, keepdim=True) * spread * width**0.5
