"""Searches of layouts for decoders on many GPUs, kept: some beside published choices.

A search takes minutes. `make plans` makes all of them anew (`tools.course.kept_plans`). Published:
torchtitan's tables of Llama 3.1 on H100s of 96 GB
(https://github.com/pytorch/torchtitan/tree/main/benchmarks).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep
from tight_fit.search.space import RECOMPUTED, Trial

FILE = Path(__file__).parent / "plans" / "searches.json"
KEPT = ("need", "fits", "seconds", "tokens_per_second_per_gpu")
ALL_WEIGHTS = {"weights": "fp32", "precision": "bf16"}  # AdamW: fp32 shards, bf16 products
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
class SearchJob:
    """A step whose layout is searched.

    model      a name on the hub, or "70B" for Llama 3.1 70B
    cluster    the GPUs
    fields     those of `ModelStep`; the batch size is that of all GPUs
    recompute  which recomputations are tried
    published  the layout and the recomputation that torchtitan published for as many GPUs
    measured   tokens per second and GPU that it measured, without torch.compile and with it; None
               where it published none. On "8B on 64" a data rank had 12 examples, here 16
    """

    model: str
    cluster: Cluster
    fields: Mapping[str, Any]
    recompute: tuple[str, ...] = RECOMPUTED
    published: Trial | None = None
    measured: tuple[int | None, int | None] = (None, None)

    @property
    def step(self) -> ModelStep:
        """The step, before micro-batches and recomputation are chosen."""
        return ModelStep(config_of(self.model), **self.fields)


def _on_h100s(model: str, machines: int, published: Trial, *measured: int | None) -> SearchJob:
    """Two examples of 8,192 tokens per GPU, on machines of eight H100s, which have NVLink inside
    and a network card per GPU."""
    cluster = Cluster("H100", 8, inside="NVLink 4")
    if machines > 1:
        cluster = Cluster("H100", 8, machines, "NVLink 4", "InfiniBand 400 Gbit", cards=8)
    fields = {"batch_size": 2 * cluster.gpus, "length": 8_192, **ALL_WEIGHTS}
    eager, compiled = measured
    return SearchJob(model, cluster, fields, RECOMPUTED, published, (eager, compiled))


LLAMA_8B = "meta-llama/Llama-3.1-8B"
JOBS = {
    "8B on 8": _on_h100s(LLAMA_8B, 1, Trial(parse("fsdp=8"), "selective"), 5_762, 6_667),
    "8B on 64": _on_h100s(LLAMA_8B, 8, Trial(parse("fsdp=8,tensor=8"), "selective"), None, 4_378),
    "70B on 256": _on_h100s("70B", 32, Trial(parse("fsdp=32,tensor=8"), "full"), None, 597),
}
_OF_TWO_MACHINES = {"batch_size": 64, "length": 4_096, **ALL_WEIGHTS}
# What lesson 18 shows of GPUs that many readers have or rent.
OWNED = {
    "two RTX 3060": SearchJob(
        "Qwen/Qwen3-0.6B",
        Cluster("RTX 3060", 2),
        {"batch_size": 16, "length": 512, **ALL_WEIGHTS},
    ),
    "two T4, fp16": SearchJob(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        Cluster("T4", 2),
        {"batch_size": 16, "length": 512, "weights": "fp32", "precision": "fp16"},
    ),
    "two RTX 3090, QLoRA": SearchJob(
        LLAMA_8B,
        Cluster("RTX 3090", 2, inside="PCIe 4 x16"),
        {
            "batch_size": 4,
            "length": 1_024,
            "base": "nf4",
            "kbit": True,
            "lora_rank": 16,
            "lora_targets": "all-linear",
            "precision": "bf16",
        },
        recompute=("full",),  # peft's preparation for 4 bits checkpoints layers anyway
    ),
    "16 A100, Ethernet": SearchJob(
        LLAMA_8B,
        Cluster("A100-80GB", 8, 2, "NVLink 3", "Ethernet 10 Gbit"),
        _OF_TWO_MACHINES,
    ),
    "16 A100, InfiniBand": SearchJob(
        LLAMA_8B,
        Cluster("A100-80GB", 8, 2, "NVLink 3", "InfiniBand 200 Gbit", cards=8),
        _OF_TWO_MACHINES,
    ),
}


def config_of(model: str) -> PretrainedConfig:
    """The configuration of a model on the hub, or of Llama 3.1 "70B"."""
    return LLAMA_70B if model == "70B" else hf_config.read(model)


def plan_one(job: SearchJob, trial: Trial) -> Facts:
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


def kept() -> dict[str, Facts]:
    """{name of a job: what `search_one` gave}, in the order of `JOBS` and `OWNED`."""
    return json.loads(FILE.read_text(encoding="utf8"))
