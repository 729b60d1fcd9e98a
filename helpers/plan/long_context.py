"""Plans of a fine-tune on long texts, kept: each GPU with texts of its own, or four for a text.

Planning all of them takes a minute. `make plans` (`python -m helpers.plan context`) plans them
anew and writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path

from tight_fit.files import replace_all
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_layout
from tight_fit.models import config as hf_config

MODEL = "meta-llama/Llama-3.1-8B"
CLUSTER = Cluster("H100", per_machine=8, inside="NVLink 4")
LENGTHS = (8_192, 32_768, 131_072, 262_144)  # tokens of a text
LAYOUTS = ("fsdp=8", "fsdp=2,context=4")
FILE = Path(__file__).parent / "plans" / "context.json"
# Tokens per second and GPU that torchtitan published (benchmarks/llama3_h100_202412_torchtitan.md)
# on H100s of 96 GB, with torch.compile and float8, which are not planned.
PUBLISHED = {(32_768, "fsdp=8"): 3_890, (131_072, "fsdp=2,context=4"): 1_071}
KEPT = ("need", "peak", "fits", "at_peak", "sent", "seconds", "tokens_per_second")


def plan_one(length: int, layout: str) -> Facts:
    """The facts `KEPT` of `layouts.facts.facts_of`, for a text per data rank.

    All weights are trained with AdamW, layers are checkpointed, and the loss is taken in chunks.
    Raises what `parse` and `plan_layout` raise.
    """
    laid, config = parse(layout), hf_config.read(MODEL)
    config.max_position_embeddings = max(LENGTHS)  # the model was made for half as many
    planned = plan_layout(
        config, laid, batch_size=laid.data, length=length, checkpointing=True, loss="chunked"
    )
    facts = facts_of(planned, CLUSTER)
    return {name: facts[name] for name in KEPT}


def write() -> Path:
    """Plan all of them and keep them; returns the path of the file."""
    entries = [
        {"length": length, "layout": layout, **plan_one(length, layout)}
        for length in LENGTHS
        for layout in LAYOUTS
    ]
    replace_all(FILE.parent, {FILE.name: json.dumps(entries, indent=1) + "\n"})
    return FILE


def kept() -> dict[tuple[int, str], Facts]:
    """{(tokens of a text, layout): facts}, in the order of `LENGTHS` and `LAYOUTS`."""
    entries = json.loads(FILE.read_text(encoding="utf8"))
    return {(entry.pop("length"), entry.pop("layout")): entry for entry in entries}
