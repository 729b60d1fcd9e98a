"""Packing: several documents in one row of a batch, none of which attends to another.

For DeBERTa, a packed row gives for each document what a row of its own would give, because DeBERTa
knows positions only as differences, and a block-diagonal attention mask hides the other documents.
Packing does not save all the work that padding costs: attention in transformers' DeBERTa has no
kernel for documents of unequal lengths, so it computes all pairs of tokens of a row and discards
those between documents. For a decoder the row's position ids say where documents begin
(`packed_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DebertaV2ForSequenceClassification

from by_hand.collate import pad
from by_hand.padding import batch_length
from helpers.batching import Batch, checked_lengths
from tight_fit.checks import IGNORE, whole


def pack(lengths: Sequence[int], capacity: int) -> list[Batch]:
    """The documents of each packed row, by first-fit decreasing.

    The longest document comes first, and each goes into the first row that has room for it. The
    number of rows is at most 11/9 of the smallest possible one, plus 6/9 (Dosa 2007,
    https://doi.org/10.1007/978-3-540-74450-4_1).

    lengths   tokens per document
    capacity  tokens per row

    Raises ValueError for a document longer than `capacity`, for no documents and for a length below
    1; TypeError for numbers that are not whole.
    """
    lengths = checked_lengths(lengths)
    batch_length(lengths, 1, whole("capacity", capacity, 1), None)  # refuses too long documents
    rows: list[Batch] = []
    room: list[int] = []  # tokens left in each row
    index, last = 0, 0
    for document in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[document]
        if length != last:  # rows without room for the last document have none for an equal one
            index, last = 0, length
        while index < len(rows) and room[index] < length:
            index += 1
        if index == len(rows):
            rows.append([])
            room.append(capacity)
        rows[index].append(document)
        room[index] -= length
    return rows


@dataclass(frozen=True)
class Packed:
    """Documents packed into rows, with what is needed to find them again.

    input_ids       int64 (rows, tokens)
    attention_mask  bool (rows, tokens, tokens): True where two tokens are of the same document
    position_ids    int64 (rows, tokens): from 0 in each document; 0 for padding
    starts          int64 (documents, 2): row and column of each document's first token, in the
                    order in which the documents were given
    labels          int64 (documents,), or None
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    starts: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.starts)

    @property
    def real(self) -> Tensor:
        """bool (rows, tokens): False for padding."""
        return self.attention_mask.diagonal(dim1=1, dim2=2)

    def to(self, device: torch.device | str) -> Packed:
        """The same batch with every tensor on `device`."""
        return Packed(
            self.input_ids.to(device),
            self.attention_mask.to(device),
            self.position_ids.to(device),
            self.starts.to(device),
            None if self.labels is None else self.labels.to(device),
        )


def packed_batch(
    documents: Sequence[Mapping | Sequence[int] | Tensor],
    pad_id: int,
    capacity: int,
    multiple_of: int = 8,
    classes: int | None = None,
) -> Packed:
    """Documents, in the forms that `collate.pad` takes, packed into rows of `capacity` tokens.

    Rows are as long as the fullest one, rounded up to `multiple_of`, but never longer than the
    capacity. The documents are those of one micro-batch, so its gradient stays the same. Raises
    ValueError or TypeError as `pad` and `pack` do, and ValueError for labels per token.
    """
    batch = pad(documents, pad_id, 1, classes=classes)
    labels = batch.get("labels")
    if labels is not None and labels.dim() != 1:
        raise ValueError(
            "Packing is for one label per document: token-level labels cannot be packed."
        )
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = pack(lengths, capacity)
    filled = [sum(lengths[document] for document in row) for row in rows]
    padded = batch_length(filled, multiple_of, None, capacity)
    input_ids = torch.full((len(rows), padded), pad_id, dtype=torch.int64)
    owner = torch.full((len(rows), padded), -1)  # the document of each token, -1 for padding
    position_ids = torch.zeros_like(input_ids)
    starts = torch.zeros(len(lengths), 2, dtype=torch.int64)
    for row, members in enumerate(rows):
        start = 0
        for document in members:
            span = slice(start, start + lengths[document])
            input_ids[row, span] = batch["input_ids"][document, : lengths[document]]
            position_ids[row, span] = torch.arange(lengths[document])
            owner[row, span] = document
            starts[document] = torch.tensor([row, start])
            start = span.stop
    mask = (owner[:, :, None] == owner[:, None, :]) & (owner >= 0)[:, :, None]
    return Packed(input_ids, mask, position_ids, starts, labels)


def packed_logits(model: DebertaV2ForSequenceClassification, packed: Packed) -> Tensor:
    """The logits (documents, classes) that rows without packing would give, in the given order.

    It runs the parts of the model one by one, because the encoder takes a mask of pairs of tokens
    and the embeddings take only a mask of tokens. It is differentiable, and follows autocast and
    checkpointing as the model does. Dropout draws other random numbers than without packing.

    Raises TypeError for another kind of model (for a LoRA model give get_base_model()), and
    ValueError for a model with a convolution over tokens, which would mix documents.
    """
    if not isinstance(model, DebertaV2ForSequenceClassification):
        raise TypeError(
            f"Packing is made for DebertaV2ForSequenceClassification, not {type(model).__name__}: "
            "give that model itself, without a wrapper."
        )
    if model.deberta.encoder.conv is not None:
        raise ValueError(
            "This DeBERTa has a convolution over neighbouring tokens (conv_kernel_size), which "
            "mixes packed documents: pad them instead."
        )
    states = model.deberta.embeddings(
        packed.input_ids, position_ids=packed.position_ids, mask=packed.real
    )
    states = model.deberta.encoder(
        states, packed.attention_mask, output_hidden_states=False
    ).last_hidden_state
    first = states[packed.starts[:, 0], packed.starts[:, 1]]
    return model.classifier(model.dropout(model.pooler(first[:, None])))


def packed_tokens(
    documents: Sequence[Mapping], pad_id: int, capacity: int, multiple_of: int = 8
) -> dict[str, Tensor]:
    """Documents with one label per token as rows for a decoder, several in each row.

    It gives input_ids, labels and position_ids, int64 (rows, tokens). Positions count from 0 in
    each document, and from 0 again in the padding. From them transformers makes the attention mask
    that keeps documents apart, if it is given neither attention_mask nor use_cache=True. A
    document's first token has the label IGNORE, as the token before it is another document's last.

    documents  mappings with input_ids and labels, as `collate.pad` takes them
    capacity   tokens per row, at most
    Raises ValueError or TypeError as `pad` and `pack` do, and ValueError for other labels.
    """
    batch = pad(documents, pad_id, 1)
    if "labels" not in batch or batch["labels"].dim() != 2:
        raise ValueError(
            "A decoder learns from one label per token: give every document as many labels as "
            "input_ids."
        )
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = pack(lengths, capacity)
    filled = [sum(lengths[document] for document in row) for row in rows]
    padded = batch_length(filled, multiple_of, None, capacity)
    shape = len(rows), padded
    packed = {
        "input_ids": torch.full(shape, pad_id, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE, dtype=torch.int64),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
    }
    for row, members in enumerate(rows):
        start = 0
        for document in members:
            size = lengths[document]
            for name in ("input_ids", "labels"):
                packed[name][row, start : start + size] = batch[name][document, :size]
            packed["labels"][row, start] = IGNORE
            packed["position_ids"][row, start : start + size] = torch.arange(size)
            start += size
        packed["position_ids"][row, start:] = torch.arange(padded - start)
    return packed
