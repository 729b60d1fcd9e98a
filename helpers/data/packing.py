"""Several documents in one row, each blind to the others: what a batch then holds, and DeBERTa run on it.

A packed row computes for each document what a row of its own would, since DeBERTa sees positions only as differences
and a block-diagonal mask hides the neighbours. It is no gain for free: attention in transformers' DeBERTa has no
kernel for unequal lengths, so it computes all pairs of a row and throws away those between documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DebertaV2ForSequenceClassification

from helpers.data.batching import Batch, batch_width, checked_lengths, whole
from helpers.data.collate import pad


def pack(lengths: Sequence[int], capacity: int) -> list[Batch]:
    """The documents of each packed row, by first-fit decreasing: the longest first, each into the first row with room.

    Never more than 11/9 of the fewest rows possible, plus 6/9 (Dosa 2007, https://doi.org/10.1007/978-3-540-74450-4_1).
    Raises ValueError for a document longer than `capacity`, no documents or a length below 1; TypeError.
    """
    lengths, room = checked_lengths(lengths), []
    rows: list[Batch] = []
    batch_width(
        lengths, 1, whole("capacity", capacity), None
    )  # refuses a document that is too long
    place, last = 0, None
    for document in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[document]
        place, last = (
            (place if length == last else 0),
            length,
        )  # rows too full for its equal are so for it
        while place < len(rows) and room[place] < length:
            place += 1
        if place == len(rows):
            rows.append([])
            room.append(capacity)
        rows[place].append(document)
        room[place] -= length
    return rows


@dataclass(frozen=True)
class Packed:
    """Documents packed into rows; positions and starts as the documents were given.

    input_ids       int64 (rows, tokens)
    attention_mask  bool (rows, tokens, tokens): True where two tokens belong to the same document
    position_ids    int64 (rows, tokens): from 0 in each document, 0 for padding
    starts          int64 (documents, 2): the row and the place of each document's first token
    labels          int64 (documents,), or None
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    starts: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        """Documents."""
        return len(self.starts)

    @property
    def real(self) -> Tensor:
        """bool (rows, tokens): False for padding."""
        return self.attention_mask.diagonal(dim1=1, dim2=2)

    def to(self, device: torch.device | str) -> Packed:
        return Packed(
            *(None if value is None else value.to(device) for value in vars(self).values())
        )


def packed_batch(
    documents: Sequence[Mapping | Sequence[int] | Tensor],
    pad_id: int,
    capacity: int,
    multiple_of: int = 8,
    classes: int | None = None,
) -> Packed:
    """Documents, as `collate.pad` takes them, packed by `pack` into rows of at most `capacity` tokens.

    Rows are as long as the fullest, rounded up to `multiple_of` but not above the capacity. The documents are those of
    one micro-batch: its gradient stays what it was. Raises ValueError or TypeError as `pad` and `pack` do, and
    ValueError for labels of tokens.
    """
    batch = pad(documents, pad_id, 1, classes=classes)
    labels = batch.get("labels")
    if labels is not None and labels.dim() != 1:
        raise ValueError(
            "Packing is for one label a document: token-level labels cannot be packed."
        )
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = pack(lengths, capacity)
    width = batch_width(
        [sum(lengths[document] for document in row) for row in rows], multiple_of, None, capacity
    )
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    owner = torch.full((len(rows), width), -1)
    position_ids, starts = (
        torch.zeros_like(input_ids),
        torch.zeros(len(lengths), 2, dtype=torch.int64),
    )
    for row, members in enumerate(rows):
        start = 0
        for document in members:
            place = slice(start, start + lengths[document])
            input_ids[row, place] = batch["input_ids"][document, : lengths[document]]
            position_ids[row, place] = torch.arange(lengths[document])
            owner[row, place] = document
            starts[document] = torch.tensor([row, start])
            start = place.stop
    mask = (owner[:, :, None] == owner[:, None, :]) & (owner >= 0)[:, :, None]
    return Packed(input_ids, mask, position_ids, starts, labels)


def packed_logits(model: DebertaV2ForSequenceClassification, packed: Packed) -> Tensor:
    """Logits (documents, classes) in the order the documents were given: those that unpacked rows would have.

    Runs the model's own parts one by one: its encoder takes a mask of pairs, its embeddings only one of tokens.
    Differentiable; follows autocast and checkpointing as the model does; dropout, where on, draws other numbers.
    Raises TypeError for another kind of model (of a LoRA model give get_base_model()) and ValueError for one with a
    convolution over tokens, which would reach across documents.
    """
    if not isinstance(model, DebertaV2ForSequenceClassification):
        raise TypeError(
            f"Packing is made for DebertaV2ForSequenceClassification, not {type(model).__name__}: give "
            "that model itself, without a wrapper."
        )
    if model.deberta.encoder.conv is not None:
        raise ValueError(
            "This DeBERTa has a convolution over neighbouring tokens (conv_kernel_size), which mixes "
            "packed documents: pad them instead."
        )
    states = model.deberta.embeddings(
        packed.input_ids, position_ids=packed.position_ids, mask=packed.real
    )
    states = model.deberta.encoder(
        states, packed.attention_mask, output_hidden_states=False
    ).last_hidden_state
    first = states[packed.starts[:, 0], packed.starts[:, 1]]
    return model.classifier(model.dropout(model.pooler(first[:, None])))
