"""Plan well-known models for the calculator: `python -m tools.calculator.make [MODEL ...]`.

Named models are planned anew and put beside those that are kept; without names it plans all. The
file is written after each model. It takes about half a minute per model.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tight_fit.checks import clipped
from tight_fit.command import kept, question
from tight_fit.command.arguments import OneLineParser, did_you_mean
from tight_fit.command.ship import asked_of
from tight_fit.command.wrapper import run
from tight_fit.gpus import GPUS
from tight_fit.models import config as hf_config
from tight_fit.models import names as model_names
from tight_fit.models.step import ModelStep
from tools.calculator.families import ModelStreams

FILE = Path(__file__).parent / "plans.json.xz"
FIRST = 0x23  # code point of the first letter of a packed stream; no quotation mark comes after it
MOST = 0xD800 - FIRST  # letters of one UTF-16 unit
# Those that people ask for most, and that no other one of the list stands for.
MODELS = (
    "google-bert/bert-base-uncased",
    "meta-llama/Llama-3.1-8B",
    "microsoft/deberta-v3-base",
    "google/vit-base-patch16-224",
    "openai-community/gpt2",
    "FacebookAI/roberta-base",
    "Qwen/Qwen2.5-0.5B",
    "meta-llama/Llama-3.2-1B",
    "microsoft/deberta-v3-large",
    "distilbert/distilbert-base-uncased",
    "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "answerdotai/ModernBERT-base",
    "Qwen/Qwen2.5-7B",
    "facebook/bart-base",
    "FacebookAI/xlm-roberta-base",
    "google-bert/bert-large-uncased",
    "sentence-transformers/all-MiniLM-L6-v2",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "openai-community/gpt2-medium",
    "openai-community/gpt2-large",
    "openai-community/gpt2-xl",
    "Qwen/Qwen2.5-1.5B",
    "facebook/dinov2-base",
    "google/electra-base-discriminator",
    "microsoft/deberta-v3-small",
    "FacebookAI/roberta-large",
    "FacebookAI/xlm-roberta-large",
    "answerdotai/ModernBERT-large",
    "openai/clip-vit-base-patch32",
    "facebook/bart-large",
)


def planned(name: str) -> dict[str, Any]:
    """What is kept of a model; its streams are lists of words yet."""
    config = hf_config.from_values(model_names.known()[name], name)
    streams = ModelStreams(config)
    made = streams.streams(lambda key: print(f"{name} {key}", file=sys.stderr, flush=True))
    step = ModelStep(config)
    most = getattr(hf_config.text_config(config), "max_position_embeddings", None)
    return {
        "parameters": streams.parameters,
        "layers": streams.layers,
        "task": step.task,
        "reads": step.reads,
        "length": step.tokens,
        "longest": most if streams.first.units > 1 else None,
        "weights": step.weights,
        "sizes": streams.sizes,
        "streams": made,
    }


def times(name: str) -> dict[str, list[float]]:
    """{GPU: [seconds, from, to]} of the model's step as the command plans it without options."""
    asked, found = asked_of(name), {}
    for gpu in GPUS.values():
        facts = kept.shipped(replace(asked, gpu=gpu))
        if facts and facts.get("seconds"):
            found[gpu.name] = [facts[f"seconds{which}"] for which in ("", "_low", "_high")]
    return found


def read_file() -> dict[str, Any]:
    """The kept plans as the file has them, streams packed; no words and models without a file.

    Raises ValueError for a damaged file.
    """
    try:
        kept = json.loads(lzma.decompress(FILE.read_bytes()))
    except FileNotFoundError:
        return {"words": "", "models": {}}
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise ValueError(f"{FILE} is damaged ({error}): delete it, or restore it.") from None
    if not isinstance(kept, dict) or not {"words", "models"} <= kept.keys():
        raise ValueError(f"{FILE} holds no plans of the calculator: delete it, or restore it.")
    return kept


def write_file(models: dict[str, dict[str, Any]]) -> None:
    """Write plans whose streams are lists of words, whole or not at all."""
    data = {"versions": question.versions(), **pack(models)}
    unfinished = FILE.with_suffix(".unfinished")
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    unfinished.write_bytes(lzma.compress(text.encode(), preset=9))
    os.replace(unfinished, FILE)


def pack(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{"words": those in use, the most frequent first, "models": streams with a letter per word}.

    Letters compress better than words. Raises ValueError where there are more words than letters.
    """
    sections = [
        s for facts in models.values() for each in facts["streams"].values() for s in each.values()
    ]
    words = [word for word, _ in Counter(word for said in sections for word in said).most_common()]
    if len(words) >= MOST:
        raise ValueError(f"The streams have {len(words)} words, and there are letters for {MOST}.")
    letters = {word: chr(FIRST + number) for number, word in enumerate(words)}
    return {
        "words": " ".join(words),
        "models": _spelled(models, lambda said: "".join(letters[word] for word in said)),
    }


def kept_models() -> dict[str, dict[str, Any]]:
    """The kept plans, their streams as lists of words again."""
    packed = read_file()
    words = packed["words"].split()
    return _spelled(packed["models"], lambda said: [words[ord(letter) - FIRST] for letter in said])


def _spelled(models: dict[str, dict[str, Any]], spell: Callable) -> dict[str, dict[str, Any]]:
    return {
        name: facts
        | {
            "streams": {
                key: {section: spell(said) for section, said in sections.items()}
                for key, sections in facts["streams"].items()
            }
        }
        for name, facts in models.items()
    }


def make(names: list[str]) -> None:
    """Plan models, and write the file after each. Raises ValueError for an unknown one."""
    for name in names:
        if name not in MODELS:
            full = model_names.full_name(name) if len(name) < 200 else name
            meant = f" Did you mean {full}?" if full in MODELS else did_you_mean(name, MODELS)
            raise ValueError(
                f"{clipped(name)!r} is none of the models of the calculator, which are named in "
                f"tools/calculator/make.py.{meant}"
            )
    models, refused = kept_models(), []
    for name in names:
        try:
            models[name] = planned(name)
        except ValueError as error:
            refused.append(f"{name}: {error}")
            continue
        write_file({each: models[each] for each in MODELS if each in models})
    if refused:
        raise ValueError(" ".join(refused))


def main() -> None:
    """Plan what is named."""
    parser = OneLineParser(prog="python -m tools.calculator.make", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these; by default all")
    make(parser.parse_args().models or list(MODELS))


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m tools.calculator.make"))
