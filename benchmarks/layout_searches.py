"""The layouts that lessons show: long texts over several GPUs, and steps whose layout is searched.

data/layouts.json has them. `make plans` (`tools.course.kept_plans`) plans all of them and keeps
what is shown in helpers/kept/, where `helpers.show` reads it. Some searches stand beside choices
that torchtitan published in its tables of Llama 3.1 on H100s of 96 GB
(https://github.com/pytorch/torchtitan/tree/main/benchmarks).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from benchmarks import pages
from helpers.kept_layouts import facts, in_words
from helpers.tables import KEPT_TABLES
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import Facts, facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.config import read
from tight_fit.models.step import ModelStep
from tight_fit.search.space import RECOMPUTED, Trial
from tight_fit.units import duration, size, span

SEARCHES = KEPT_TABLES.with_name("searches.json")


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
_DATA = json.loads((pages.DATA / "layouts.json").read_text(encoding="utf8"))
TEXTS = {  # by the number of GPUs
    int(gpus): Texts(
        kept["model"],
        Cluster(**kept["cluster"]),
        tuple((length, at) for length, at in kept["asked"]),
    )
    for gpus, kept in _DATA["texts"].items()
}
# Tokens per second and GPU that torchtitan published (benchmarks/llama3_h100_202412_torchtitan.md)
# on H100s of 96 GB, with torch.compile and float8, which these plans leave out.
PUBLISHED = {(32_768, "fsdp=8"): 3_890, (131_072, "fsdp=2,context=4"): 1_071}


def of_texts(gpus: int = 8) -> dict[tuple[int, str], Facts]:
    """{(tokens of a text, layout): facts} of that many GPUs, in the order of `TEXTS`."""
    texts = TEXTS[gpus]
    return {
        (length, layout): facts(texts.step(length, layout), parse(layout), texts.cluster)
        for length, layout in texts.asked
    }


KEPT_OF_TRIAL = ("need", "fits", "seconds", "tokens_per_second_per_gpu")


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


def _job(kept: dict[str, Any]) -> SearchJob:
    made: dict[str, Any] = {
        name: tuple(kept[name]) for name in ("recompute", "measured") if name in kept
    }
    if "published" in kept:
        layout, recompute = kept["published"]
        made["published"] = Trial(parse(layout), recompute)
    return SearchJob(**kept | made | {"cluster": Cluster(**kept["cluster"])})


LLAMA_8B = "meta-llama/Llama-3.1-8B"
# Two examples of 8,192 tokens per GPU, on machines of eight H100s, which have NVLink inside and a
# network card per GPU.
JOBS = {name: _job(kept) for name, kept in _DATA["jobs"].items()}
# What lesson 18 shows of GPUs that many readers have or rent. With peft's preparation for 4 bits
# only full recomputation is tried, as it checkpoints layers anyway.
OWNED = {name: _job(kept) for name, kept in _DATA["owned"].items()}


def config_of(model: str) -> PretrainedConfig:
    """The configuration of a model on the hub, or of Llama 3.1 "70B" (table 3 of the Llama 3 paper,
    arXiv 2407.21783)."""
    return pages.config_of("Llama-3.1-70B") if model == "70B" else read(model)


def plan_trial(job: SearchJob, trial: Trial) -> Facts:
    """What is kept of a trial, with as many times its micro-batches as it takes to fit.

    Raises what `plan_step` raises.
    """
    selective = trial.recompute == "selective"
    planned = plan_step(trial.step(job.step), trial.layout, selective=selective)
    found = facts_of(planned, job.cluster)
    rows = job.step.batch_size // trial.layout.data
    if found["fits"] or 2 * trial.accumulation > rows:
        return trial_row(trial, found)
    return plan_trial(job, replace(trial, accumulation=2 * trial.accumulation))


def trial_row(trial: Trial, found: Facts) -> Facts:
    """What is kept of a planned trial."""
    return {
        "layout": str(trial.layout),
        "recompute": trial.recompute,
        "micro_batches": trial.accumulation,
        **{name: found[name] for name in KEPT_OF_TRIAL},
    }


def kept_searches() -> dict[str, Facts]:
    """{name of a job: what `kept_plans.search_one` gave}, in the order of `JOBS` and `OWNED`."""
    return json.loads(SEARCHES.read_text(encoding="utf8"))


def shown() -> dict[str, dict[str, Any]]:
    """{name: rows and caption} of each table that `helpers.show` gives of these plans."""
    texts = {f"contexts {gpus}": contexts(gpus) for gpus in TEXTS}
    return texts | {name: large(name) for name in JOBS | OWNED} | {"owned": owned()}


def contexts(gpus: int) -> dict[str, Any]:
    """A row per length and layout of `TEXTS`: bytes per GPU, and the step's time."""
    texts, rows = TEXTS[gpus], []
    for (length, layout), found in of_texts(gpus).items():
        sent = found["sent"].get("context", {})
        row = {
            "tokens": f"{length:,}",
            "layout": layout,
            "need per GPU": size(found["need"]),
            "fits": "yes" if found["fits"] else "no",
            "activations": size(found["at_peak"].get("activations", 0)),
            "keys and values sent": size(sum(sent.values())) if sent else "nothing",
            "time per step": span(found["seconds"]),
            "tokens per second": f"{parse(layout).data * length / found['seconds']:,.0f}",
        }
        if gpus == 8:
            published = PUBLISHED.get((length, layout))
            row["published"] = f"{published * gpus:,}" if published else ""
        rows.append(row)
    caption = (
        f"Planned, nothing was run: {texts.model.partition('/')[2]} on {texts.cluster}, a text per "
        "data rank; fp32 weights, computed in bf16, fused AdamW, fused (sdpa) attention, gradient "
        "checkpointing, the loss in chunks, not compiled."
    )
    if gpus == 8:
        caption += (
            " 262,144 tokens are twice as many as the model was made for. Published: torchtitan's, "
            "with torch.compile and float8, which the plan leaves out."
        )
    return {"rows": rows, "caption": caption}


def large(name: str) -> dict[str, Any]:
    """The layouts of a search, the best first; the last column marks the published one.

    It has torchtitan's tokens per second and GPU. A job of `OWNED` has no such column.
    """
    job, found = (JOBS | OWNED)[name], kept_searches()[name]
    published, rows = found["published"], found["rows"]
    rows += [published] if published and published not in rows else []
    marks = [{"published": _measured(job) if row == published else ""} for row in rows]
    return {
        "rows": [_line(row) | (mark if published else {}) for row, mark in zip(rows, marks)],
        "caption": f"Planned, nothing was run: {_model(job)} on {job.cluster}, {_examples(job)}; "
        f"{in_words(job.step)}.",
    }


def owned() -> dict[str, Any]:
    """A row per job of `OWNED`: what the search takes, and one GPU beside it."""
    rows = []
    for name, job in OWNED.items():
        found = kept_searches()[name]
        best, alone = found["rows"][0], found["alone"]
        rows.append(
            {
                "GPUs": name,
                "step": f"{_model(job)}, {_examples(job)}",
                **_line(best),
                "one GPU": duration(alone) if alone else "does not fit",
            }
        )
    caption = (
        "Planned, nothing was run: the layout that a search takes, a row per job; computed in bf16 "
        "but for the fp16 of the T4, fused AdamW, fused (sdpa) attention, not compiled."
    )
    return {"rows": rows, "caption": caption}


def _model(job: SearchJob) -> str:
    name = "Llama-3.1-70B" if job.model == "70B" else job.model.split("/")[-1]
    return name.replace("-", " ")


def _examples(job: SearchJob) -> str:
    return f"{job.step.batch_size} examples of {job.step.tokens:,} tokens per step"


def _measured(job: SearchJob) -> str:
    eager, compiled = job.measured
    return f"torchtitan's: {f'{eager:,}, ' if eager else ''}compiled {compiled:,}"


def _line(row: Facts) -> dict[str, str]:
    return {
        "layout": row["layout"],
        "recomputation": row["recompute"],
        "micro-batches": str(row["micro_batches"]),
        "need per GPU": size(row["need"]),
        "time per step": duration(row["seconds"]),
        "tokens per second and GPU": f"{row['tokens_per_second_per_gpu']:,.0f}",
    }
