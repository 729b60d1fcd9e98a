"""From the examples of a data set to tensors: what the training loop takes its batches from."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from helpers.chat import encode_conversations
from helpers.sets import load as load
from helpers.sets import source as source
from tight_fit.checks import IGNORE, READS, shown

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image
    from transformers import PreTrainedModel

    from helpers.recipe import Recipe


# What SentencePiece's own normaliser ("nmt_nfkc") does beside NFKC: it turns other white space into
# spaces and drops control characters.
_SPACES = dict.fromkeys(
    map(ord, "\t\n\f\r\u061c\u1680\u200b\u200c\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd"), " "
)
_DROPPED = dict.fromkeys([*range(1, 9), 0x0B, *range(0x0E, 0x20), 0x7F, 0x8F, 0x9F])
MULTIPLE = 8  # tokens: the length of a trimmed batch is rounded up to a multiple of it
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers, which image processors store


@dataclass(frozen=True)
class Pixels:
    """How an image becomes the input of a model.

    side       height and width of the input, in pixels
    mean, std  per channel: a value v of 0 ... 255 becomes (v / 255 - mean) / std
    resample   Pillow's number of the filter that resizes: 2 (bilinear) or 3 (bicubic)
    """

    side: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = 2

    @classmethod
    def of(cls, folder: Path) -> Pixels:
        """The settings in the preprocessor_config.json of a model's folder."""
        given = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf8"))
        size = given["size"]
        side = size["height"] if isinstance(size, dict) else size
        mean, std = tuple(given["image_mean"]), tuple(given["image_std"])
        return cls(side, mean, std, int(given.get("resample", 2)))

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (images, channels, height, width) to fp32 (images, channels, side, side)."""
        values = images.float()
        if values.shape[-2:] != (self.side, self.side):
            values = interpolate(
                values, (self.side, self.side), mode=RESAMPLE[self.resample], antialias=True
            )
            values = values.round().clamp(0, 255)  # as Pillow stores a resized image
        mean, std = (
            values.new_tensor(numbers).view(1, -1, 1, 1) for numbers in (self.mean, self.std)
        )
        return (values / 255 - mean) / std


@dataclass(frozen=True)
class Encoded:
    """An encoded split, in CPU memory. Images stay uint8, at their own size, until batched.

    columns  what the model takes: input_ids and attention_mask, int64 (examples, length), or
             pixel_values, uint8 (examples, channels, height, width); and labels, int64 (examples,).
             For a language model input_ids and labels, int64 (examples, length); labels are
             `values.IGNORE` everywhere but in the answer
    lengths  int64 (examples,): tokens that are not padding; 1 for an image
    pixels   how images become input; None for text
    trim     cut each batch to the length of its longest example, rounded up to a multiple of 8,
             which tensor cores like
    """

    columns: dict[str, Tensor]
    lengths: Tensor
    pixels: Pixels | None = None
    trim: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def copy(self, trim: bool) -> Encoded:
        """The same examples in tensors of its own, batched with this `trim`."""
        columns = {name: column.clone() for name, column in self.columns.items()}
        return replace(self, columns=columns, lengths=self.lengths.clone(), trim=trim)

    def batch(
        self, examples: Sequence[int] | Tensor, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """The model inputs and labels of these examples, given by their indices, on `device`.

        Images are resized and normalised there, to fp32. Raises IndexError for an example that does
        not exist.
        """
        indices = torch.as_tensor(examples, dtype=torch.int64)
        columns = self.columns
        if self.trim:
            longest = -(-int(self.lengths[indices].max()) // MULTIPLE) * MULTIPLE
            columns = {
                name: column[:, :longest] if column.dim() == 2 else column
                for name, column in columns.items()
            }
        batch = {name: _moved(column[indices], device) for name, column in columns.items()}
        if self.pixels is not None:
            batch["pixel_values"] = self.pixels(batch["pixel_values"])
        return batch

    def counted(self, examples: Sequence[int] | Tensor) -> int:
        """How many labels of these examples the loss counts: the divisor of their mean loss."""
        labels = self.columns["labels"]
        if labels.dim() == 1:
            return len(examples)
        return int((labels[torch.as_tensor(examples, dtype=torch.int64), 1:] != IGNORE).sum())

    def _check_conversations(self, recipe: Recipe) -> None:
        ids, labels = self.columns["input_ids"], self.columns["labels"]
        if ids.shape != labels.shape or ids.is_floating_point() or labels.is_floating_point():
            raise ValueError(
                "These conversations must have input_ids and labels of one shape, (examples, "
                f"tokens), in whole numbers, and have {tuple(ids.shape)} and "
                f"{tuple(labels.shape)}: encode a split for this recipe."
            )
        marked = labels != IGNORE
        if int(ids.min()) < 0 or not torch.equal(labels[marked], ids[marked]):
            raise ValueError(
                "The labels of these conversations must be the tokens of their answers, and "
                f"{IGNORE} elsewhere: encode a split for this recipe."
            )
        if not marked[:, 1:].any(1).all():
            raise ValueError(
                "A conversation has no answer: every label of it is ignored, and nothing could be "
                "learned from it."
            )

    def check_suits(self, recipe: Recipe) -> None:
        """Raises ValueError, in one sentence, where the recipe's model cannot be trained on it."""
        column = "pixel_values" if recipe.task == "image" else "input_ids"
        if not len(self) or column not in self.columns or "labels" not in self.columns:
            raise ValueError(
                f"These {len(self)} examples are none of {recipe.task}s with labels, which "
                f"model={recipe.model!r} reads: encode a split for this recipe."
            )
        sizes = {len(values) for values in (*self.columns.values(), self.lengths)}
        if recipe.task != "image":
            tokens = self.columns["input_ids"].shape[-1]
            if int(self.lengths.min()) < 1 or int(self.lengths.max()) > tokens:
                raise ValueError(
                    f"The lengths of these examples must be from 1 to {tokens} tokens, the width "
                    "of input_ids: encode a split for this recipe."
                )
        if (self.columns["labels"].dim() == 2) != (recipe.task == "chat"):
            raise ValueError(
                f"These examples have labels of another task than {recipe.task!r}, which "
                f"model={recipe.model!r} learns: encode a split for this recipe."
            )
        if recipe.task == "chat" and len(sizes) == 1:
            self._check_conversations(recipe)
            return
        least, most = (int(value) for value in self.columns["labels"].aminmax())
        if len(sizes) > 1 or least < 0 or most >= recipe.classes:
            raise ValueError(
                f"These examples have labels from {least} to {most}, and columns of "
                f"{' and '.join(map(str, sorted(sizes)))} examples: labels go from 0 to "
                f"{recipe.classes - 1}, and columns are of one length."
            )

    def __getitem__(self, example: int) -> dict[str, Tensor]:
        """One example without the batch dimension: what torch's DataLoader asks of a data set."""
        return {name: values[0] for name, values in self.batch([example]).items()}


def _moved(rows: Tensor, device: torch.device | str) -> Tensor:
    """The rows on `device`; to a GPU without waiting for what it still has to compute.

    From pinned memory a copy only joins the GPU's queue. The memory may go at once: PyTorch gives
    it to no other tensor before the copy is done (`CachingHostAllocator`).
    """
    if torch.device(device).type != "cuda":
        return rows.to(device)
    return rows.pin_memory().to(device, non_blocking=True)


def normalise(text: str) -> str:
    """The text as DeBERTa-v3's SentencePiece model would normalise it.

    transformers converts that model without its normaliser (it keeps NFC and drops repeated
    spaces), so ligatures, full-width letters and control characters would become [UNK].
    """
    return unicodedata.normalize("NFKC", text.translate(_SPACES | _DROPPED)).strip(" ")


def encode(split: Dataset, recipe: Recipe, processor) -> Encoded:
    """A split as tensors for the model of the recipe.

    processor  for text: a tokenizer. Texts are normalised (see `normalise`), then cut and padded to
               recipe.tokens; a language model gets conversations about them (`chat`). For images:
               Pixels, or the folder of a model that has them.

    Raises ValueError, in one sentence, for columns of the other task, an empty text, a label out of
    range, and a training split that is smaller than one batch of the recipe.
    """
    column = READS[recipe.task]
    if column not in split.column_names:
        raise ValueError(
            f"The {recipe.task} model {recipe.model!r} needs a column {column!r}; this data set "
            f"has {', '.join(split.column_names)}."
        )
    if split.split != "test" and len(split) < recipe.batch_size:
        raise ValueError(
            f"The training split has {len(split)} examples, fewer than one batch of "
            f"{recipe.batch_size}: lower batch_size or raise train_size."
        )
    labels = torch.tensor(split["label"][:], dtype=torch.int64)
    classes = split.features["label"].num_classes
    outside = ((labels < 0) | (labels >= classes)).nonzero()
    if len(outside):
        example = int(outside[0])
        raise ValueError(
            f"Example {example} has label {int(labels[example])}: labels go from 0 to "
            f"{classes - 1}."
        )
    if recipe.task != "image":
        texts = split["text"][:]
        for example, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"Example {example} has no text: drop it before encoding.")
        if recipe.task == "chat":
            assert recipe.tokens is not None, "only images have no length"
            names = [split.features["label"].names[label] for label in split["label"][:]]
            columns, lengths = encode_conversations(
                [normalise(text) for text in texts], names, recipe.tokens, processor
            )
            return Encoded(columns, lengths, trim=recipe.padding != "fixed")
        return _encode_text(texts, labels, recipe, processor)
    pixels = processor if isinstance(processor, Pixels) else Pixels.of(processor)
    columns = {"pixel_values": _stack(split["image"], pixels), "labels": labels}
    return Encoded(columns, torch.ones(len(labels), dtype=torch.int64), pixels)


def _encode_text(texts: list[str], labels: Tensor, recipe: Recipe, tokenizer) -> Encoded:
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


def _stack(images: Sequence[Image], pixels: Pixels) -> Tensor:
    """uint8 (images, channels, height, width); images of unequal sizes are resized to `side`."""
    mode = "RGB" if len(pixels.mean) == 3 else "L"
    converted = [image.convert(mode) for image in images]
    if len({image.size for image in converted}) > 1:
        square = (pixels.side, pixels.side)
        converted = [image.resize(square, pixels.resample) for image in converted]
    arrays = np.stack([np.asarray(image) for image in converted])
    stacked = torch.from_numpy(arrays.reshape(*arrays.shape[:3], -1))
    return stacked.permute(0, 3, 1, 2).contiguous()


def check_words(examples: Encoded, model: PreTrainedModel) -> None:
    """Raises ValueError for tokens that the model's word embedding has no row for."""
    if not isinstance(examples, Encoded) or "input_ids" not in examples.columns:
        return
    words = len(model.get_input_embeddings().get_parameter("weight"))
    least, most = (int(value) for value in examples.columns["input_ids"].aminmax())
    if least < 0 or most >= words:
        raise ValueError(
            f"These examples have tokens from {least} to {most}, and the model knows those "
            f"from 0 to {words - 1}: encode the texts with the model's own tokenizer."
        )


def batches_of(name: str, value: Encoded) -> Encoded:
    """The split, or what does for one. Raises TypeError for anything else."""
    if not (hasattr(value, "__len__") and callable(getattr(value, "batch", None))):
        raise TypeError(
            f"{name} must be of type Encoded, or have a length and a `batch` as it has, and is "
            f"{shown(value)}."
        )
    return value
