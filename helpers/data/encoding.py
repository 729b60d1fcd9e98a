"""From rows to tensors: what the training loop takes its batches from."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

if TYPE_CHECKING:
    from datasets import Dataset

    from helpers.recipe import Recipe

# What SentencePiece's own normaliser ("nmt_nfkc") does beside NFKC: other white space, control characters.
_SPACES = dict.fromkeys(
    map(ord, "\t\n\f\r\u061c\u1680\u200b\u200c\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd"), " "
)
_DROPPED = dict.fromkeys([*range(1, 9), 0x0B, *range(0x0E, 0x20), 0x7F, 0x8F, 0x9F])
MULTIPLE = 8  # tokens: what a trimmed batch is rounded up to
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers, which image processors store


@dataclass(frozen=True)
class Pixels:
    """How a picture becomes a model's input: side in pixels, (value / 255 - mean) / std a channel."""

    side: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = 2

    @classmethod
    def of(cls, processor) -> Pixels:
        """From an image processor, its settings as a dict, or a folder that holds preprocessor_config.json.

        Raises ValueError for settings that this encoder cannot follow: not a square, another filter.
        """
        if isinstance(processor, cls):
            return processor
        if isinstance(processor, (str, Path)):
            processor = json.loads(
                (Path(processor) / "preprocessor_config.json").read_text(encoding="utf8")
            )
        if not isinstance(processor, Mapping):
            processor = processor.to_dict()
        size, resample = processor["size"], int(processor.get("resample", 2))
        height, width = (
            (size["height"], size["width"]) if isinstance(size, Mapping) else (size, size)
        )
        if height != width:
            raise ValueError(
                f"The image processor asks for {height} x {width} pixels: only squares will do."
            )
        if resample not in RESAMPLE:
            raise ValueError(
                f"The image processor asks for resampling filter {resample}: use 2 (bilinear) "
                "or 3 (bicubic)."
            )
        return cls(height, tuple(processor["image_mean"]), tuple(processor["image_std"]), resample)

    def __call__(self, pictures: Tensor) -> Tensor:
        """uint8 (rows, channels, height, width) to fp32 (rows, channels, side, side)."""
        values = pictures.float()
        if values.shape[-2:] != (self.side, self.side):
            values = interpolate(
                values, (self.side, self.side), mode=RESAMPLE[self.resample], antialias=True
            )
            values = values.round().clamp(0, 255)  # as Pillow stores a resized picture
        mean, std = (
            values.new_tensor(numbers).view(1, -1, 1, 1) for numbers in (self.mean, self.std)
        )
        return (values / 255 - mean) / std


@dataclass(frozen=True)
class Encoded:
    """An encoded split, in CPU memory; pictures stay uint8 at their own size until a batch is asked for.

    columns  what the model takes: input_ids and attention_mask, int64 (rows, length), or pixel_values,
             uint8 (rows, channels, height, width); and labels, int64 (rows,)
    lengths  int64 (rows,): tokens that are not padding; 1 for a picture
    pixels   how pictures become input; None for text
    trim     cut each batch to its longest row, rounded up to a multiple of 8, which tensor cores like
    """

    columns: dict[str, Tensor]
    lengths: Tensor
    pixels: Pixels | None = None
    trim: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """The rows' model inputs with labels, on `device`, where pictures are resized and normalised to fp32.

        Raises IndexError for a row that does not exist.
        """
        rows = torch.as_tensor(rows, dtype=torch.int64)
        columns = self.columns
        if self.trim:
            longest = -(-int(self.lengths[rows].max()) // MULTIPLE) * MULTIPLE
            columns = {
                name: column[:, :longest] if column.dim() == 2 else column
                for name, column in columns.items()
            }
        part = {name: column[rows].to(device) for name, column in columns.items()}
        if self.pixels is not None:
            part["pixel_values"] = self.pixels(part["pixel_values"])
        return part

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """One row without the batch dimension: what torch's DataLoader asks of a data set."""
        return {name: values[0] for name, values in self.batch([row]).items()}


def normalise(text: str) -> str:
    """The text as DeBERTa-v3's SentencePiece model would normalise it.

    transformers converts that model without its normaliser (it keeps NFC and drops repeated spaces), so
    ligatures, full-width letters and control characters would become [UNK].
    """
    return unicodedata.normalize("NFKC", text.translate(_SPACES | _DROPPED)).strip(" ")


def encode(split: Dataset, recipe: Recipe, processor) -> Encoded:
    """A split as tensors for the recipe's model.

    processor  text: a tokenizer; texts are normalised (see `normalise`), cut and padded to recipe.tokens.
               images: an image processor, its settings, its folder, or Pixels.

    Raises ValueError, in one sentence, for columns of the other task, an empty text, a label out of range, or
    a training split smaller than one batch of the recipe.
    """
    column = "text" if recipe.task == "text" else "image"
    if column not in split.column_names:
        raise ValueError(
            f"The {recipe.task} model {recipe.model!r} needs a column {column!r}; this data set "
            f"has {', '.join(split.column_names)}."
        )
    if split.split != "test" and len(split) < recipe.batch_size:
        raise ValueError(
            f"The training split has {len(split)} rows, fewer than one batch of "
            f"{recipe.batch_size}: lower batch_size or raise train_size."
        )
    labels = torch.tensor(split["label"][:], dtype=torch.int64)
    classes = split.features["label"].num_classes
    outside = ((labels < 0) | (labels >= classes)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise ValueError(
            f"Row {row} has label {int(labels[row])}: labels go from 0 to {classes - 1}."
        )
    if recipe.task == "text":
        return _encode_text(split["text"][:], labels, recipe, processor)
    pixels = Pixels.of(processor)
    columns = {"pixel_values": _stack(split["image"], pixels), "labels": labels}
    return Encoded(columns, torch.ones(len(labels), dtype=torch.int64), pixels)


def _encode_text(texts: list[str], labels: Tensor, recipe: Recipe, tokenizer) -> Encoded:
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"Row {row} has no text: drop it before encoding.")
    out = tokenizer(
        [normalise(text) for text in texts],
        padding="max_length",
        truncation=True,
        max_length=recipe.tokens,
        return_tensors="pt",
    )
    columns = {
        "input_ids": out["input_ids"],
        "attention_mask": out["attention_mask"],
        "labels": labels,
    }
    return Encoded(columns, out["attention_mask"].sum(1), trim=recipe.padding != "fixed")


def _stack(images, pixels: Pixels) -> Tensor:
    """uint8 (rows, channels, height, width); pictures of unequal sizes are resized to the model's first."""
    mode = "RGB" if len(pixels.mean) == 3 else "L"
    pictures = [image.convert(mode) for image in images]
    if len({picture.size for picture in pictures}) > 1:
        pictures = [
            picture.resize((pixels.side, pixels.side), pixels.resample) for picture in pictures
        ]
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    stacked = torch.from_numpy(arrays.reshape(*arrays.shape[:3], -1))
    return stacked.permute(0, 3, 1, 2).contiguous()
