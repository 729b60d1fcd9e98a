"""Searches of layouts for decoders of 8 and 70 billion parameters, kept, beside published choices.

A search takes a minute or two. `make plans` (`python -m helpers.strategy large`) makes all of them
anew and writes the file. Published: torchtitan's tables of Llama 3.1 on H100s
(https://github.com/pytorch/torchtitan/tree/main/benchmarks), whose GPUs had 96 GB.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig

from helpers.strategy.plan_cache import pretty
from tight_fit.command.search_report import answer
from tight_fit.files import replace_all
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep
from tight_fit.search.layouts import search_layouts
from tight_fit.search.space import Trial

FILE = Path(__file__).parent / "plans" / "long" / "large.json"
KEPT = ("need", "fits", "seconds", "tokens_per_second_per_gpu")
LENGTH = 8_192  # tokens of an example
LLAMA_70B = LlamaConfig(  # table 3 of the Llama 3 paper (arXiv 2407.21783)
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)


@dataclass(frozen=True)
class LargeJob:
    """A job of two examples per GPU, on machines of eight H100s.

    model      "8B" or "70B", of Llama 3.1
    published  the layout and the recomputation that torchtitan published for as many GPUs
    measured   tokens per second and GPU that it measured, without torch.compile and with it; None
               where it published none. On "8B on 64" a data rank had 12 examples, here 16
    """

    model: str
    machines: int
    published: Trial
    measured: tuple[int | None, int]

    @property
    def cluster(self) -> Cluster:
        """H100s with NVLink in a machine, and a network card per GPU between machines."""
        if self.machines == 1:
            return Cluster("H100", 8, inside="NVLink 4")
        return Cluster("H100", 8, self.machines, "NVLink 4", "InfiniBand 400 Gbit", cards=8)

    @property
    def step(self) -> ModelStep:
        """AdamW on all weights: fp32 shards, bf16 products and messages."""
        return ModelStep(
            config_of(self.model),
            batch_size=2 * self.cluster.gpus,
            length=LENGTH,
            weights="fp32",
            precision="bf16",
        )


JOBS = {
    "8B on 8": LargeJob("8B", 1, Trial(parse("fsdp=8"), "selective"), (5_762, 6_667)),
    "8B on 64": LargeJob("8B", 8, Trial(parse("fsdp=8,tensor=8"), "selective"), (None, 4_378)),
    "70B on 256": LargeJob("70B", 32, Trial(parse("fsdp=32,tensor=8"), "full"), (None, 597)),
}


def config_of(model: str) -> PretrainedConfig:
    """The configuration of Llama 3.1 in the size "8B" or "70B"."""
    return LLAMA_70B if model == "70B" else hf_config.read("meta-llama/Llama-3.1-8B")


def plan_one(job: LargeJob, trial: Trial) -> Facts:
    """What is kept of a trial, with as many times its micro-batches as it takes to fit.

    Raises what `plan_step` raises.
    """
    selective = trial.recompute == "selective"
    planned = plan_step(trial.step(job.step), trial.layout, selective=selective)
    facts = facts_of(planned, job.cluster)
    rows = job.step.batch_size // trial.layout.data
    if facts["fits"] or 2 * trial.accumulation > rows:
        return row(trial, facts)
    return plan_one(job, replace(trial, accumulation=2 * trial.accumulation))


def row(trial: Trial, facts: Facts) -> Facts:
    """What is kept of a planned trial."""
    return {
        "layout": str(trial.layout),
        "recompute": trial.recompute,
        "micro_batches": trial.accumulation,
        **{name: facts[name] for name in KEPT},
    }


def search_one(job: LargeJob) -> Facts:
    """The answer of a search, the best trial of each layout, the best first, and the published one.

    Raises what `search_layouts` raises.
    """
    found = search_layouts(job.step, job.cluster)
    rows: dict[str, Facts] = {}
    for one in found.ranked:
        rows.setdefault(str(one.trial.layout), row(one.trial, one.facts))
    return {
        "answer": answer(found),
        "rows": list(rows.values()),
        "published": plan_one(job, job.published),
    }


def write() -> Path:
    """Search all of them and keep what was found; returns the path of the file."""
    entries = [{"job": name, **search_one(job)} for name, job in JOBS.items()]
    replace_all(FILE.parent, {FILE.name: pretty(entries) + "\n"})
    return FILE


def kept() -> dict[str, Facts]:
    """{name of a job: what `search_one` gave}, in the order of `JOBS`."""
    entries = json.loads(FILE.read_text(encoding="utf8"))
    return {entry.pop("job"): entry for entry in entries}
