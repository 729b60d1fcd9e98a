"""What lessons show of layouts over several GPUs, kept: no reader waits for their plans.

A plan of a pipeline of 8 billion parameters takes minutes. `make plans` (`python -m helpers.plan
layouts`) plans all `questions` anew and writes the file. What is not kept is planned when it is
asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import cache, lru_cache
from pathlib import Path

from tight_fit.command.question import digest
from tight_fit.files import replace_all
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of
from tight_fit.layouts.layout import SCHEDULES, Layout, parse
from tight_fit.layouts.plan import LayoutPlan, plan_step
from tight_fit.models.config import read
from tight_fit.models.step import ModelStep

FILE = Path(__file__).parent / "plans" / "layouts.json"
KEPT = ("need", "fits", "card_memory", "sent", "seconds")
DIGITS = 6

Question = tuple[ModelStep, Layout, Cluster]


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
        for name in KEPT
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


def questions() -> Iterator[Question]:
    """What the tables of lessons 13, 15, 16 and 18 ask, those of lab 19, and a page."""
    deberta = read("microsoft/deberta-v3-base")
    one, two = parse("ddp=1"), parse("ddp=2")
    accumulated = ModelStep(deberta, 64, 256, accumulation=4, precision="fp16")
    for layout in (one, two, parse("ddp=2", gradient_as_bucket_view=True)):
        yield accumulated, layout, Cluster("T4", per_machine=2, inside="PCIe 3 x16")
    few = ModelStep(deberta, 32, 256, precision="fp16")
    for layout in (one, parse("ddp=8")):
        yield few, layout, Cluster("T4", machines=8, between="Ethernet 1 Gbit")
    vit = read("google/vit-base-patch16-224-in21k")
    images = ModelStep(vit, 64, classes=10, optimizer="adamw_foreach", max_grad_norm=None)
    for layout in (one, two):
        yield images, layout, Cluster("RTX 3060", per_machine=2, inside="PCIe 3 x16")
    llama = ModelStep(
        read("meta-llama/Llama-3.1-8B"), 32, 4096, accumulation=32, weights="fp32", precision="bf16"
    )
    apart = Cluster("H100", machines=8, between="Ethernet 100 Gbit")
    together = Cluster("H100", per_machine=8, inside="NVLink 4")
    stages = {name: parse("pipeline=8", schedule=name) for name in SCHEDULES}
    for layout in stages.values():
        yield llama, layout, apart
    yield llama, stages["1f1b"], together
    for cluster in (apart, together):
        yield replace(llama, accumulation=1, checkpointing=True), parse("fsdp=8"), cluster
    tiny = ModelStep(
        read("TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        8,
        512,
        accumulation=8,
        weights="fp32",
        precision="bf16",
        checkpointing=True,
    )
    pair = Cluster("RTX 3060", machines=2, between="Ethernet 1 Gbit")
    for layout in (one, parse("pipeline=2")):
        yield tiny, layout, pair
    yield replace(tiny, accumulation=1), parse("fsdp=2"), pair
    yield from _of_lesson_16()
    kaggle = Cluster("T4", per_machine=2)
    qwen = ModelStep(read("Qwen/Qwen3-0.6B"), 8, 256, weights="fp32")
    yield replace(qwen, accumulation=4), two, kaggle  # lesson 18
    yield replace(qwen, accumulation=8, precision="fp16"), one, kaggle
    large = ModelStep(read("microsoft/deberta-v3-large"), 16, 512, precision="fp16")
    yield replace(large, accumulation=8), one, kaggle  # lab 19
    yield replace(large, accumulation=4), two, kaggle
    yield from page()


def page() -> Iterator[Question]:
    """What the first table of docs/layouts.md asks: a step on two GPUs, on fast and slow links."""
    config = read("TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    step = ModelStep(config, 16, 512, accumulation=4, weights="fp32", precision="bf16")
    for name in ("ddp=1", "ddp=2", "zero1=2", "zero2=2", "fsdp=2", "tensor=2", "pipeline=2"):
        for link in ("NVLink 3", "PCIe 4 x16"):
            yield step, parse(name), Cluster("A100-40GB", per_machine=2, inside=link)


def _of_lesson_16() -> Iterator[Question]:
    llama = ModelStep(
        read("meta-llama/Llama-3.1-8B"),
        8,
        4096,
        weights="fp32",
        precision="bf16",
        checkpointing=True,
    )
    fsdp, tensor = parse("fsdp=8"), parse("tensor=8")
    nvlink = Cluster("H100", per_machine=8, inside="NVLink 4")
    for layout in (fsdp, tensor):
        yield llama, layout, nvlink
        yield llama, layout, Cluster("A100-80GB", per_machine=8, inside="PCIe 4 x16")
    for length in (4096, 32768):
        for layout in (tensor, parse("context=8")):
            yield replace(llama, batch_size=1, length=length), layout, nvlink
    small = ModelStep(read("Qwen/Qwen3-0.6B"), 2, 512, weights="fp32", precision="bf16")
    pair = Cluster("RTX 3060", per_machine=2, inside="PCIe 3 x16")
    for name in ("ddp=1", "fsdp=2", "tensor=2"):
        yield small, parse(name), pair


def write() -> Path:
    """Plan all of `questions` and keep the answers; returns the path of the file."""
    lines = [f"{json.dumps(key(*one))}: {json.dumps(plan_one(*one))}" for one in questions()]
    replace_all(FILE.parent, {FILE.name: "{\n" + ",\n".join(lines) + "\n}\n"})
    return FILE
