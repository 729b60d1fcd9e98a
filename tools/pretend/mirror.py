"""A mirror of the hub under the real names, with narrow models and little data, made here.

The files are those that the hub has: configuration, `spm.model`, weights in fp16 as safetensors or,
for DeBERTa-base, as pytorch_model.bin, CIFAR-10 as Parquet, 20 Newsgroups as JSON lines. Weights
are random, pictures are scikit-learn's digits, texts are those of Reuters R8 under other labels.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from transformers import DebertaV2Model, ViTImageProcessor, ViTModel

from helpers import models, sets
from helpers.recipe import Recipe
from tools.pretend import build, narrow

FOLDER = build.FOLDER / "mirror"
TRAIN, TEST = 1000, 60  # examples of each data set
VERSION = "3"  # of what this module writes; a mirror of another version is made anew


def folder() -> Path:
    """The mirror, made now where it is not there yet (about 20 s); others who need it wait."""
    mark = FOLDER / "version"
    with build.alone("mirror"):
        if not mark.exists() or mark.read_text() != VERSION:
            unfinished = FOLDER.with_name(f"mirror-{os.getpid()}")
            make(unfinished)
            (unfinished / "version").write_text(VERSION)
            shutil.rmtree(FOLDER, ignore_errors=True)
            unfinished.rename(FOLDER)
    return FOLDER


def make(place: Path) -> None:
    """Write the mirror into a folder."""
    lines = texts("train") + texts("test")
    for model in ("deberta", "deberta-large"):
        _deberta(place / "models" / models.REPOS[model], model, lines)
    _vit(place / "models" / models.REPOS["vit"])
    _newsgroups(place / "datasets" / sets.NEWSGROUPS_REPO)
    _cifar10(place / "datasets" / sets.CIFAR10_REPO / "plain_text")


def texts(split: str) -> list[str]:
    """News items of Reuters R8, which the course ships."""
    shipped = sets.read_shipped(split)
    if shipped is None:
        raise FileNotFoundError("The course's own texts are missing: restore helpers/r8.")
    return list(shipped[1])


def _deberta(place: Path, model: str, lines: list[str]) -> None:
    import sentencepiece

    place.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[:2000]),
        model_prefix=f"{place}/spm",
        vocab_size=2000,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[CLS]",
        eos_piece="[SEP]",
        unk_piece="[UNK]",
        num_threads=1,
        minloglevel=2,
    )
    (place / "spm.vocab").unlink()
    (place / "tokenizer_config.json").write_text('{"do_lower_case": false, "vocab_type": "spm"}')
    torch.manual_seed(0)
    config = narrow.narrowed(models.config(Recipe(model, profile="full")), model)
    encoder = DebertaV2Model(config).half()
    encoder.save_pretrained(place)
    if model == "deberta":
        (place / "model.safetensors").unlink()
        torch.save(encoder.state_dict(), place / "pytorch_model.bin")


def _vit(place: Path) -> None:
    torch.manual_seed(0)
    config = narrow.narrowed(models.config(Recipe("vit", profile="full")), "vit")
    ViTModel(config).save_pretrained(place)
    side = config.image_size
    ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(place)


def _newsgroups(place: Path) -> None:
    place.mkdir(parents=True)
    for split, count in (("train", TRAIN), ("test", TEST)):
        rows = [
            {
                "text": line,
                "label": number % len(sets.NEWSGROUPS),
                "label_text": sets.NEWSGROUPS[number % len(sets.NEWSGROUPS)],
            }
            for number, line in enumerate(texts(split)[:count])
        ]
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _cifar10(place: Path) -> None:
    place.mkdir(parents=True)
    digits = sets.digits()
    for split, count in (("train", TRAIN), ("test", TEST)):
        rows = digits[split].select(range(count))
        table = pyarrow.table(
            {
                "img": [{"bytes": _png(row["image"]), "path": None} for row in rows],
                "label": [int(row["label"]) for row in rows],
            }
        )
        pyarrow.parquet.write_table(table, place / f"{split}-00000-of-00001.parquet")


def _png(picture) -> bytes:
    kept = io.BytesIO()
    picture.resize((32, 32)).save(kept, format="PNG")
    return kept.getvalue()
