"""Plans of a fine-tune on long texts, kept: each GPU with texts of its own, or several for a text.

Planning all of them takes a minute. `make plans` (`python -m helpers.plan context`) plans them
anew and writes the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tight_fit.files import replace_all
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_layout
from tight_fit.models import config as hf_config


@dataclass(frozen=True)
class Texts:
    """What is planned on one cluster: (tokens of a text, layout), a text per data rank."""

    model: str
    cluster: Cluster
    asked: tuple[tuple[int, str], ...]


LENGTHS = (8_192, 32_768, 131_072, 262_144)
WHOLE, SPLIT = LAYOUTS = ("fsdp=8", "fsdp=2,context=4")
EIGHT = [(length, layout) for length in LENGTHS for layout in LAYOUTS]
EIGHT.insert(EIGHT.index((131_072, SPLIT)), (131_072, "fsdp=4,context=2"))
PAIR = [(length, layout) for length in (32_768, 65_536) for layout in ("fsdp=2", "context=2")]
TEXTS = {  # by the number of GPUs
    8: Texts(
        "meta-llama/Llama-3.1-8B",
        Cluster("H100", per_machine=8, inside="NVLink 4"),
        tuple(EIGHT),
    ),
    2: Texts(
        "meta-llama/Llama-3.2-1B",
        Cluster("RTX 4090", per_machine=2, inside="PCIe 4 x16"),
        tuple(PAIR),
    ),
}
FILE = Path(__file__).parent / "plans" / "context.json"
# Tokens per second and GPU that torchtitan published (benchmarks/llama3_h100_202412_torchtitan.md)
# on H100s of 96 GB, with torch.compile and float8, which are not planned.
PUBLISHED = {(32_768, "fsdp=8"): 3_890, (131_072, "fsdp=2,context=4"): 1_071}
KEPT = ("need", "peak", "fits", "at_peak", "sent", "seconds", "tokens_per_second")


def plan_one(gpus: int, length: int, layout: str) -> Facts:
    """The facts `KEPT` of `layouts.facts.facts_of`, for a text per data rank.

    All weights are trained with AdamW, layers are checkpointed, and the loss is taken in chunks.
    Raises what `parse` and `plan_layout` raise, KeyError for a number of GPUs not in `TEXTS`.
    """
    texts = TEXTS[gpus]
    laid, config = parse(layout), hf_config.read(texts.model)
    config.max_position_embeddings = max(LENGTHS)  # Llama 3.1 was made for half as many
    planned = plan_layout(
        config, laid, batch_size=laid.data, length=length, checkpointing=True, loss="chunked"
    )
    facts = facts_of(planned, texts.cluster)
    return {name: facts[name] for name in KEPT}


def write() -> Path:
    """Plan all of them and keep them; returns the path of the file."""
    entries = [
        {"gpus": gpus, "length": length, "layout": layout, **plan_one(gpus, length, layout)}
        for gpus, texts in TEXTS.items()
        for length, layout in texts.asked
    ]
    replace_all(FILE.parent, {FILE.name: json.dumps(entries, indent=1) + "\n"})
    return FILE


def kept(gpus: int = 8) -> dict[tuple[int, str], Facts]:
    """{(tokens of a text, layout): facts} of that many GPUs, in the order of `TEXTS`."""
    entries = json.loads(FILE.read_text(encoding="utf8"))
    return {
        (entry.pop("length"), entry.pop("layout")): entry
        for entry in entries
        if entry.pop("gpus") == gpus
    }
