"""The command `tight-fit`: one GPU (`tight_fit.command.options`) and, with --layout or --gpus,
many.

Its first word may be "script": then it plans a program (`tight_fit.command.script`). After
"explain" it explains a memory snapshot (`tight_fit.command.explain`), and "calibrate" measures the
GPU at hand (`tight_fit.command.calibrate`).

tight-fit meta-llama/Llama-3.1-8B --gpu H100 --layout fsdp=8 --batch 16 --length 8192
tight-fit meta-llama/Llama-3.1-8B --gpu H100 --gpus 8 --length 8192     (searches the layout)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tight_fit.command import calibrate, deferred, explain, question, script
from tight_fit.command import options as command
from tight_fit.command.question import Question
from tight_fit.command.wrapper import importing, run
from tight_fit.gpus import GPU

if TYPE_CHECKING:
    from tight_fit.layouts.cluster import Cluster

PROGRAMS = {  # first words that are no model
    "script": script.main,
    "explain": explain.main,
    "calibrate": calibrate.main,
}

# The links that machines with such GPUs have, where nothing is said: inside and between machines,
# and how many network cards there are for each GPU. Others are taken to have PCIe and Ethernet.
USUAL = {
    "H100": ("NVLink 4", "InfiniBand 400 Gbit", True),
    "H200": ("NVLink 4", "InfiniBand 400 Gbit", True),
    "A100-40GB": ("NVLink 3", "InfiniBand 200 Gbit", True),
    "A100-80GB": ("NVLink 3", "InfiniBand 200 Gbit", True),
}
OTHERS = ("PCIe 4 x16", "Ethernet 100 Gbit", False)


def main(arguments: Sequence[str] | None = None, prog: str = command.NAME) -> int:
    """Run the command and return the exit status; argparse itself exits with 2."""
    return command.main(arguments, prog, answer)


def answer(asked: Question, options: argparse.Namespace) -> int:
    """Plan a layout, or search one, and print what was found; 0 where it fits, 1 where it does not.

    Raises ValueError or TypeError, in one sentence.
    """
    return _search(asked, options) if options.layout is None else _plan(asked, options)


def _plan(asked: Question, options: argparse.Namespace) -> int:
    with importing():
        from tight_fit.command import layout_report
        from tight_fit.command.answer import quietly
        from tight_fit.gpus.specs import check_fp8
        from tight_fit.layouts import facts as layout_facts
        from tight_fit.layouts.layout import parse
        from tight_fit.layouts.plan import plan_layout
        from tight_fit.models import config as hf_config
    layout = parse(
        options.layout,
        reshard=not options.no_reshard,
        wrap=options.wrap or "layers",
        prefetch=options.prefetch or 0,
        schedule=options.schedule or "1f1b",
    )
    if options.schedule and layout.pipeline == 1:
        raise ValueError(
            "--schedule is that of a pipeline: name its stages in --layout, as pipeline=4, or "
            "leave it out."
        )
    if options.reduce and layout.strategy == "ddp":
        raise ValueError("--reduce says how FSDP2 sums gradients: leave it out with ddp.")
    cluster = cluster_of(asked.gpu, layout.ranks, options)
    usual: dict[str, Any] = {"batch_size": question.BATCH, "precision": _precision(cluster)}
    fields = usual | asked.fields
    check_fp8(fields.get("float8"), cluster.gpu)
    if options.recompute:
        fields["checkpointing"] = True
    with quietly():
        planned = plan_layout(
            hf_config.from_values(asked.values, asked.name),
            layout,
            selective=options.recompute == "selective",
            reduce=options.reduce or "fp32",
            **fields,
        )
    facts = layout_facts.facts_of(planned, cluster)
    if options.json:
        print(json.dumps({"model": asked.name} | facts, indent=1))
    else:
        print("\n".join(layout_report.lines_of(facts, asked.name)))
    return 0 if facts["fits"] else 1


def _search(asked: Question, options: argparse.Namespace) -> int:
    if not options.gpus:
        raise ValueError(
            "--machines says how GPUs are divided: say with --gpus how many there are."
        )
    if options.no_reshard or any(
        getattr(options, name) is not None for name in ("prefetch", "wrap", "schedule")
    ):
        raise ValueError(
            "--no-reshard, --wrap, --prefetch and --schedule are details of one layout: name it "
            "with --layout, or leave them out of a search."
        )
    cluster = cluster_of(asked.gpu, options.gpus, options)
    progress = command.Progress()
    progress.say("loading PyTorch and transformers")
    with importing():
        from tight_fit.command import search_report
        from tight_fit.command.answer import quietly
        from tight_fit.gpus.specs import check_fp8, no_speed, speed_of
        from tight_fit.models import config as hf_config
        from tight_fit.models.step import ModelStep
        from tight_fit.search.layouts import search_layouts
        from tight_fit.search.space import RECOMPUTED
    if speed_of(cluster.gpu.name) is None:
        raise ValueError(f"Layouts are compared by their time, and {no_speed(cluster.gpu)}")
    check_fp8(asked.fields.get("float8"), cluster.gpu)
    usual: dict[str, Any] = {
        "batch_size": -(-max(question.BATCH, 2 * cluster.gpus) // cluster.gpus) * cluster.gpus,
        "weights": "fp32",
        "precision": _precision(cluster),
    }
    if asked.fields.get("base") is not None:  # another word for `weights`
        del usual["weights"]
    fields = usual | asked.fields
    given = options.recompute or ("full" if fields.pop("checkpointing", False) else None)
    with quietly():
        found = search_layouts(
            ModelStep(hf_config.from_values(asked.values, asked.name), **fields),
            cluster,
            (given,) if given else RECOMPUTED,
            asked.fields.get("accumulation"),
            options.reduce or "fp32",
            progress.say,
        )
    progress.clear()
    facts = search_report.report_of(found, asked.model, _typed(cluster, fields, options))
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print("\n".join(search_report.lines_of(facts, found)))
    return 0 if found.best else 1


def _precision(cluster: Cluster) -> str:
    """What is computed in where nothing is said: bf16, or fp16 where the GPU has no bf16."""
    return "bf16" if cluster.gpu.bf16 else "fp16"


def _typed(cluster: Cluster, fields: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """{option or field: value} that stay as they are in every layout."""
    links = {"inside": cluster.inside.name, "between": cluster.between.name, "cards": cluster.cards}
    said = {name: links[name] for name in links if getattr(options, name)}
    reduce = {"reduce": options.reduce} if options.reduce == "bf16" else {}
    machines = {"machines": cluster.machines} if cluster.machines > 1 else {}
    left = ("accumulation", "max_grad_norm")  # what the search sets, and what another option does
    kept = {name: value for name, value in fields.items() if name not in left}
    return {"gpu": cluster.gpu.name} | machines | said | kept | reduce


def cluster_of(gpu: GPU | None, ranks: int, options: argparse.Namespace) -> Cluster:
    """The machines of a layout. Raises ValueError where GPUs and layout do not go together."""
    from tight_fit.layouts.cluster import Cluster

    if gpu is None:
        raise ValueError("A layout is planned for a kind of GPU: name it with --gpu.")
    machines = options.machines or 1
    if options.gpus not in (None, ranks):
        raise ValueError(
            f"--layout {options.layout} is one of {ranks} GPUs, and --gpus is {options.gpus}: let "
            "the axes of the layout multiply to the number of GPUs."
        )
    if ranks % machines:
        raise ValueError(
            f"{ranks} GPUs cannot be divided evenly over {machines} machines: use another number."
        )
    inside, between, each = USUAL.get(gpu.name, OTHERS)
    return Cluster(
        gpu,
        ranks // machines,
        machines,
        inside if options.inside is None else options.inside,
        between if options.between is None else options.between,
        cards=options.cards or (ranks // machines if each else 1),
    )


def entry(prog: str = command.NAME) -> int:
    """What `tight-fit` runs: the command, with everything that may end it told in one line."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in PROGRAMS:
        named = f"{prog} {word}"
        return run(lambda: PROGRAMS[word](sys.argv[2:], named), named)
    if "--compile" not in sys.argv:  # what Dynamo traces is decorated by it when it is imported
        deferred.put_off()
    return run(lambda: main(prog=prog), prog)
