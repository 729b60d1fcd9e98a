"""What lessons show of layouts over several GPUs, kept: no reader waits for their plans.

A plan of a pipeline of 8 billion parameters takes minutes. `make plans` plans all that lessons ask
anew (`tools.course.kept_plans`). What is not kept is planned when it is asked for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from pathlib import Path

from tight_fit.command.question import digest
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.plan import LayoutPlan, plan_step
from tight_fit.models.config import read
from tight_fit.models.step import ModelStep

FILE = Path(__file__).parent / "plans" / "layouts.json"
KEPT = ("need", "fits", "card_memory", "sent", "seconds")
DIGITS = 6


@dataclass(frozen=True)
class Texts:
    """Long texts on one cluster, a text per data rank: (tokens of a text, layout), in order."""

    model: str
    cluster: Cluster
    asked: tuple[tuple[int, str], ...]

    def step(self, length: int, layout: str) -> ModelStep:
        """All weights are trained with AdamW, layers are checkpointed, the loss is in chunks."""
        config = read(self.model)
        config.max_position_embeddings = max(LENGTHS)  # Llama 3.1 was made for half as many
        return ModelStep(
            config,
            parse(layout).data,
            length,
            weights="fp32",
            precision="bf16",
            checkpointing=True,
            loss="chunked",
        )


LENGTHS = (8_192, 32_768, 131_072, 262_144)
LAYOUTS = ("fsdp=8", "fsdp=2,context=4")
EIGHT = [(length, layout) for length in LENGTHS for layout in LAYOUTS]
EIGHT.insert(EIGHT.index((131_072, LAYOUTS[1])), (131_072, "fsdp=4,context=2"))
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
# Tokens per second and GPU that torchtitan published (benchmarks/llama3_h100_202412_torchtitan.md)
# on H100s of 96 GB, with torch.compile and float8, which these plans leave out.
PUBLISHED = {(32_768, "fsdp=8"): 3_890, (131_072, "fsdp=2,context=4"): 1_071}


def facts(job: ModelStep, layout: Layout, cluster: Cluster) -> Facts:
    """The facts `KEPT` of `tight_fit.layouts.facts.facts_of`, kept or planned now.

    job  its batch size is that of all GPUs
    Raises what `plan_step` raises.
    """
    found = _kept().get(key(job, layout, cluster))
    return found or plan_one(job, layout, cluster)


def key(job: ModelStep, layout: Layout, cluster: Cluster) -> str:
    """40 hexadecimal digits of all that an answer depends on, beside the planner itself.

    Fields of the step that are as usual are left out, so that a new one leaves keys as they are.
    """
    config = {**job.config.to_diff_dict(), "transformers_version": None}
    named = [one for one in fields(job) if one.name != "config"]
    step = {one.name: value for one in named if (value := getattr(job, one.name)) != one.default}
    return digest([config, step, asdict(layout), str(cluster)])


def plan_one(job: ModelStep, layout: Layout, cluster: Cluster) -> Facts:
    """What is kept of one question, planned now."""
    of_plan = facts_of(_planned(repr(job.config), job, layout), cluster)
    return {
        name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        # Tables of long texts show activations as well.
        for name in (*KEPT, *["at_peak"] * (job.loss == "chunked"))
        for value in [of_plan.get(name)]
    }


@lru_cache(maxsize=64)
def _planned(config: str, job: ModelStep, layout: Layout) -> LayoutPlan:
    """A plan depends on no GPU and on no link. The configuration does not count when two steps are
    compared, and so its text is a key of its own."""
    return plan_step(job, layout)


@cache
def _kept() -> dict[str, Facts]:
    return json.loads(FILE.read_text(encoding="utf8")) if FILE.exists() else {}


def of_texts(gpus: int = 8) -> dict[tuple[int, str], Facts]:
    """{(tokens of a text, layout): facts} of that many GPUs, in the order of `TEXTS`."""
    texts = TEXTS[gpus]
    return {
        (length, layout): facts(texts.step(length, layout), parse(layout), texts.cluster)
        for length, layout in texts.asked
    }
