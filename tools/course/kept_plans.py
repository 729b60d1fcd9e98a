"""The plans kept for lessons, made anew: `python -m tools.course.kept_plans` (`make plans`).

It takes many minutes. Each group has its file in helpers/kept/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Qwen3MoeConfig

from benchmarks import layout_searches, techniques
from benchmarks.sweeps import results
from helpers import kept_layouts
from helpers.tables import KEPT_TABLES
from tight_fit.command.arguments import OneLineParser
from tight_fit.command.search_report import answer
from tight_fit.command.wrapper import run
from tight_fit.files import replace_all
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of_step
from tight_fit.layouts.layout import SCHEDULES, Layout, parse
from tight_fit.models.config import read
from tight_fit.models.step import ModelStep
from tight_fit.search.layouts import Searched, search_layouts
from tight_fit.search.space import Trial

NAME = "python -m tools.course.kept_plans"
ONE_GPU = Layout(1, "ddp")
KEPT = ("need", "fits", "card_memory", "sent", "seconds")
DIGITS = 6
LLAMA, TINY = "meta-llama/Llama-3.1-8B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
H100S = Cluster("H100", per_machine=8, inside="NVLink 4")
A100S = Cluster("A100-80GB", per_machine=8, inside="PCIe 4 x16")
TWO_T4S = Cluster("T4", per_machine=2, inside="PCIe 3 x16")
TWO_3060S = Cluster("RTX 3060", per_machine=2, inside="PCIe 3 x16")
Question = tuple[ModelStep, Layout, Cluster]


def step(model: str, batch_size: int, length: int | None = None, **fields: Any) -> ModelStep:
    """A step: of fp32 weights computed in bf16, where `fields` say nothing else."""
    given = {"weights": "fp32", "precision": "bf16"} | fields
    return ModelStep(read(model), batch_size, length, **given)


def on(cluster: Cluster, asked: ModelStep, *layouts: str) -> Iterator[Question]:
    """A step in each of these layouts on a cluster."""
    for layout in layouts:
        yield asked, parse(layout), cluster


def questions() -> Iterator[Question]:
    """What the tables of lessons 13, 15, 16, 18 and 24 ask, those of lab 19, and a page."""
    deberta = step("microsoft/deberta-v3-base", 64, 256, accumulation=4, precision="fp16")
    slow = Cluster("T4", machines=8, between="Ethernet 1 Gbit")
    yield from on(TWO_T4S, deberta, "ddp=1", "ddp=2")
    yield deberta, parse("ddp=2", gradient_as_bucket_view=True), TWO_T4S
    yield from on(slow, replace(deberta, batch_size=32, accumulation=1), "ddp=1", "ddp=8")
    plain = {"optimizer": "adamw_foreach", "max_grad_norm": None, "precision": "fp32"}
    vit = step("google/vit-base-patch16-224-in21k", 64, classes=10, **plain)
    yield from on(TWO_3060S, vit, "ddp=1", "ddp=2")
    llama = step(LLAMA, 32, 4096, accumulation=32)
    apart = Cluster("H100", machines=8, between="Ethernet 100 Gbit")
    for schedule in SCHEDULES:
        yield llama, parse("pipeline=8", schedule=schedule), apart
    yield llama, parse("pipeline=8", schedule="1f1b"), H100S
    for cluster in (apart, H100S):
        yield from on(cluster, replace(llama, accumulation=1, checkpointing=True), "fsdp=8")
    tiny = step(TINY, 8, 512, accumulation=8, checkpointing=True)
    pair = Cluster("RTX 3060", machines=2, between="Ethernet 1 Gbit")
    yield from on(pair, tiny, "ddp=1", "pipeline=2")
    yield from on(pair, replace(tiny, accumulation=1), "fsdp=2")
    yield from _of_lesson_16()
    kaggle = Cluster("T4", per_machine=2)
    qwen = step("Qwen/Qwen3-0.6B", 8, 256, accumulation=4, precision="fp32")
    yield from on(kaggle, qwen, "ddp=2")  # lesson 18
    yield from on(kaggle, replace(qwen, accumulation=8, precision="fp16"), "ddp=1")
    large = step("microsoft/deberta-v3-large", 16, 512, accumulation=8, precision="fp16")
    yield from on(kaggle, large, "ddp=1")  # lab 19
    yield from on(kaggle, replace(large, accumulation=4), "ddp=2")
    yield from _of_lesson_24()
    yield from page()
    for texts in layout_searches.TEXTS.values():
        for length, name in texts.asked:
            yield texts.step(length, name), parse(name), texts.cluster


def page() -> Iterator[Question]:
    """What the first table of docs/layouts.md asks: a step on two GPUs, on fast and slow links."""
    tiny = step(TINY, 16, 512, accumulation=4)
    for name in ("ddp=1", "ddp=2", "zero1=2", "zero2=2", "fsdp=2", "tensor=2", "pipeline=2"):
        for link in ("NVLink 3", "PCIe 4 x16"):
            yield from on(Cluster("A100-40GB", per_machine=2, inside=link), tiny, name)


def _of_lesson_24() -> Iterator[Question]:
    """Qwen3-30B-A3B, whose experts are sharded by FSDP, or spread over the ranks."""
    mixture = Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
        tie_word_embeddings=False,
    )
    lean = {"checkpointing": True, "loss": "chunked"}
    asked = ModelStep(mixture, 8, 4096, weights="fp32", precision="bf16", **lean)
    for layout in ("fsdp=8", "fsdp=8,expert=8"):
        for cluster in (H100S, A100S):
            yield from on(cluster, asked, layout)


def _of_lesson_16() -> Iterator[Question]:
    llama = step(LLAMA, 8, 4096, checkpointing=True)
    for layout in ("fsdp=8", "tensor=8"):
        for cluster in (H100S, A100S):
            yield from on(cluster, llama, layout)
    for length in (4096, 32768):
        yield from on(H100S, replace(llama, batch_size=1, length=length), "tensor=8", "context=8")
    yield from on(TWO_3060S, step("Qwen/Qwen3-0.6B", 2, 512), "ddp=1", "fsdp=2", "tensor=2")


def plan_one(job: ModelStep, layout: Layout, cluster: Cluster) -> Facts:
    """What is kept of one question, planned now."""
    of_plan = facts_of_step(job, layout, cluster)
    return {
        name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        # Tables of long texts show activations as well.
        for name in (*KEPT, *["at_peak"] * (job.loss == "chunked"))
        for value in [of_plan.get(name)]
    }


def layouts() -> Path:
    """Plan all of `questions` and keep the answers; returns the path of the file."""
    lines = [
        f"{json.dumps(kept_layouts.key(*one))}: {json.dumps(plan_one(*one))}" for one in questions()
    ]
    return _write(kept_layouts.FILE, "{\n" + ",\n".join(lines) + "\n}\n")


def search_one(job: layout_searches.SearchJob) -> Facts:
    """What is kept of a search: its answer, the best trial of each layout, the best first, and the
    published one, if any; "alone" has the seconds of one GPU, None where it does not fit.

    Raises what `search_layouts` raises.
    """
    found = search_layouts(job.step, job.cluster, job.recompute)
    rows: dict[str, Facts] = {}
    for one in found.ranked:
        rows.setdefault(str(one.trial.layout), layout_searches.trial_row(one.trial, one.facts))
    published = layout_searches.plan_trial(job, job.published) if job.published else None
    entry = {"answer": answer(found), "rows": list(rows.values()), "published": published}
    return entry | {"alone": _alone(job, found)}


def _alone(job: layout_searches.SearchJob, found: Searched) -> float | None:
    """Seconds of the step on one GPU: planned by the search, or now where it only said slower."""
    seconds = [one.seconds for one in found.ranked if one.trial.layout == ONE_GPU]
    slower = {trial.recompute for trial in found.slower if trial.layout == ONE_GPU}
    if not seconds and slower:
        rows = [
            layout_searches.plan_trial(job, Trial(ONE_GPU, kind))
            for kind in job.recompute
            if kind in slower
        ]
        seconds = [one["seconds"] for one in rows if one["fits"]]
    return min(seconds, default=None)


def searched() -> Path:
    """Search all jobs and keep what was found; returns the path of the file."""
    jobs = layout_searches.JOBS | layout_searches.OWNED
    entries = {name: search_one(job) for name, job in jobs.items()}
    return _write(layout_searches.SEARCHES, json.dumps(entries, indent=1) + "\n")


def all_tables() -> dict[str, Any]:
    """{name: rows and caption} of what the other groups hold, and of techniques for one GPU."""
    return layout_searches.shown() | techniques.shown()


def tables() -> Path:
    """Keep `all_tables`; returns the path of the file."""
    return _write(KEPT_TABLES, json.dumps(all_tables(), indent=1) + "\n")


def _write(file: Path, text: str) -> Path:
    replace_all(file.parent, {file.name: text})
    return file


GROUPS = {
    "layouts": layouts,
    "searches": searched,
    "tables": tables,
    "sweeps": results.keep,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan the groups that are asked for and write each to its file."""
    parser = OneLineParser(prog=NAME, description=__doc__)
    groups = ", ".join(GROUPS)
    parser.add_argument("groups", nargs="*", metavar="group", help=f"{groups}; all by default")
    asked = parser.parse_args(arguments).groups or GROUPS
    if unknown := ", ".join(repr(group) for group in asked if group not in GROUPS):
        parser.error(f"{unknown} is not known: use {groups}.")
    for group in asked:
        print(f"Written: {GROUPS[group]()}", flush=True)


if __name__ == "__main__":
    raise SystemExit(run(main, NAME))
