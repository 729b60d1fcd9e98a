"""Where the modules that lay in helpers are today, for notebooks that were written before.

An import of one of them ends in one sentence, which names its new place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import NoReturn

PLACES = {
    "helpers.clock": "helpers.train",
    "helpers.commands": "tight_fit.command",
    "helpers.commands.arguments": "tight_fit.command.arguments",
    "helpers.commands.wrapper": "tight_fit.command.wrapper",
    "helpers.data.batching": "helpers.batching",
    "helpers.data.chat": "helpers.chat",
    "helpers.data.collate": "by_hand.collate",
    "helpers.data.encoding": "helpers.data",
    "helpers.data.images": "helpers.sets",
    "helpers.data.offline": "helpers.offline",
    "helpers.data.packing": "by_hand.packing",
    "helpers.data.samplers": "by_hand.samplers",
    "helpers.data.steps": "helpers.batching",
    "helpers.data.subset": "helpers.sets",
    "helpers.data.text": "helpers.sets",
    "helpers.downloads": "tight_fit.models",
    "helpers.downloads.damaged": "tight_fit.models.damaged",
    "helpers.downloads.local": "tight_fit.models.local",
    "helpers.downloads.patience": "tight_fit.models.patience",
    "helpers.downloads.repositories": "tight_fit.models.repositories",
    "helpers.fields": "tight_fit.techniques",
    "helpers.fields.settings": "tight_fit.techniques.settings",
    "helpers.fields.techniques": "tight_fit.techniques.rules",
    "helpers.files": "tight_fit.files",
    "helpers.frameworks": "by_hand.frameworks",
    "helpers.gpus": "tight_fit.gpus",
    "helpers.hub": "tight_fit.models.hub",
    "helpers.isolation": "tight_fit.isolation",
    "helpers.isolation.inherited": "tight_fit.isolation.inherited",
    "helpers.isolation.places": "tight_fit.isolation.places",
    "helpers.isolation.process": "tight_fit.isolation.process",
    "helpers.isolation.system": "tight_fit.isolation.system",
    "helpers.kernels": "by_hand",
    "helpers.kernels.gelu_half2": "by_hand.gelu_half2",
    "helpers.kernels.nvrtc": "by_hand.nvrtc",
    "helpers.language": "tight_fit.techniques",
    "helpers.language.chunked_loss": "tight_fit.techniques.chunked_loss",
    "helpers.language.four_bits": "tight_fit.techniques.four_bits",
    "helpers.language.next_token": "tight_fit.techniques.next_token",
    "helpers.language.targets": "tight_fit.techniques.targets",
    "helpers.memory": "helpers.measure",
    "helpers.memory.allocator": "tight_fit.memory.allocator",
    "helpers.memory.cleanup": "helpers.measure",
    "helpers.memory.cublas": "tight_fit.trace.cublas",
    "helpers.memory.described": "tight_fit.command.alt_text",
    "helpers.memory.figures": "helpers.plots",
    "helpers.memory.flops": "tight_fit.trace.flops",
    "helpers.memory.history": "tight_fit.memory.history",
    "helpers.memory.measurement": "helpers.measure",
    "helpers.memory.repeated_layers": "tight_fit.trace.repeated_layers",
    "helpers.memory.splice": "tight_fit.trace.splice",
    "helpers.memory.timeline": "tight_fit.memory.plan",
    "helpers.memory.told_apart": "tight_fit.command.told_apart",
    "helpers.memory.trace": "tight_fit.trace.steps",
    "helpers.memory.tracker": "tight_fit.trace.tracker",
    "helpers.model_changes": "tight_fit.techniques.model_changes",
    "helpers.notebook_setup": "helpers.setup",
    "helpers.optimizers": "tight_fit.techniques.optimizers",
    "helpers.packages.cells": "helpers.packages",
    "helpers.packages.here": "tight_fit.packages",
    "helpers.packages.install": "helpers.packages",
    "helpers.packages.old_torchao": "tight_fit.old_torchao",
    "helpers.packages.required": "helpers.packages",
    "helpers.parallel.clipping": "tight_fit.layouts.clipping",
    "helpers.parallel.collectives": "by_hand.collectives",
    "helpers.parallel.comm_meter": "tight_fit.layouts.messages",
    "helpers.parallel.ddp": "tight_fit.layouts.ddp",
    "helpers.parallel.dtensor_dropout": "tight_fit.layouts.tensor",
    "helpers.parallel.exchange": "by_hand.exchange",
    "helpers.parallel.layout": "tight_fit.layouts.layout",
    "helpers.parallel.model_context": "tight_fit.layouts.context",
    "helpers.parallel.model_experts": "tight_fit.layouts.experts",
    "helpers.parallel.model_layout": "tight_fit.layouts.layout",
    "helpers.parallel.model_pipeline": "tight_fit.layouts.stages",
    "helpers.parallel.model_rank": "tight_fit.layouts.rank",
    "helpers.parallel.model_tensor": "tight_fit.layouts.tensor",
    "helpers.parallel.model_wrapping": "tight_fit.layouts.wrapping",
    "helpers.parallel.pipeline": "by_hand.pipeline",
    "helpers.parallel.pipeline_rank": "tight_fit.layouts.pipeline_rank",
    "helpers.parallel.pipeline_runner": "by_hand.pipeline_runner",
    "helpers.parallel.pipeline_stage": "by_hand.pipeline_stage",
    "helpers.parallel.rank": "tight_fit.layouts.rank",
    "helpers.parallel.schedules": "tight_fit.layouts.schedules",
    "helpers.parallel.tensor_by_hand": "by_hand.tensor",
    "helpers.parallel.tensor_dtensor": "tight_fit.layouts.tensor",
    "helpers.parallel.torch_private_ranks": "tight_fit.layouts.torch_private_ranks",
    "helpers.parallel.transport": "by_hand.transport",
    "helpers.parallel.zero_by_hand": "by_hand.zero",
    "helpers.plan.answer": "tight_fit.command.answer",
    "helpers.plan.batch_line": "tight_fit.plans.batch_line",
    "helpers.plan.command": "tight_fit.command.options",
    "helpers.plan.compiled": "tight_fit.plans.compiled",
    "helpers.plan.config_bounds": "tight_fit.models.bounds",
    "helpers.plan.cuda_kernels": "tight_fit.trace.cuda_kernels",
    "helpers.plan.custom_step": "tight_fit.plans.own_step",
    "helpers.plan.data_parallel": "tight_fit.trace.data_parallel",
    "helpers.plan.fake_tensors": "tight_fit.trace.fake_tensors",
    "helpers.plan.fastest": "tight_fit.search.fastest",
    "helpers.plan.gpu_calls": "tight_fit.trace.gpu_calls",
    "helpers.plan.hf_config": "tight_fit.models.config",
    "helpers.plan.hf_model": "tight_fit.models.step",
    "helpers.plan.hf_plan": "tight_fit.plans.model",
    "helpers.plan.kept": "tight_fit.command.kept",
    "helpers.plan.model_names": "tight_fit.models.names",
    "helpers.plan.quantized": "tight_fit.trace.quantized",
    "helpers.plan.question": "tight_fit.command.question",
    "helpers.plan.releases": "tight_fit.trace.releases",
    "helpers.plan.remedies": "tight_fit.search.remedies",
    "helpers.plan.report": "tight_fit.command.report",
    "helpers.plan.ship": "tight_fit.command.ship",
    "helpers.schematics": "helpers.drawings",
    "helpers.schematics.accumulation": "helpers.drawings",
    "helpers.schematics.checkpointing": "helpers.drawings",
    "helpers.schematics.choosing": "helpers.drawings",
    "helpers.schematics.clusters": "helpers.drawings",
    "helpers.schematics.compiling": "helpers.drawings",
    "helpers.schematics.data_parallel": "helpers.drawings",
    "helpers.schematics.drawing": "helpers.drawings",
    "helpers.schematics.feeding": "helpers.drawings",
    "helpers.schematics.freezing": "helpers.drawings",
    "helpers.schematics.language": "helpers.drawings",
    "helpers.schematics.libraries": "helpers.drawings",
    "helpers.schematics.long_context": "helpers.drawings",
    "helpers.schematics.lora": "helpers.drawings",
    "helpers.schematics.moving": "helpers.drawings",
    "helpers.schematics.optimizer_states": "helpers.drawings",
    "helpers.schematics.padding": "helpers.drawings",
    "helpers.schematics.pipeline": "helpers.drawings",
    "helpers.schematics.precision": "helpers.drawings",
    "helpers.schematics.pretrained": "helpers.drawings",
    "helpers.schematics.qlora": "helpers.drawings",
    "helpers.schematics.sharding": "helpers.drawings",
    "helpers.schematics.tensor_split": "helpers.drawings",
    "helpers.schematics.training_step": "helpers.drawings",
    "helpers.schematics.trust_ratio": "helpers.drawings",
    "helpers.script": "tight_fit.script",
    "helpers.script.answer": "tight_fit.script.answer",
    "helpers.script.changes": "tight_fit.script.changes",
    "helpers.script.command": "tight_fit.command.script",
    "helpers.script.existing": "tight_fit.script.existing",
    "helpers.script.explain": "tight_fit.command.explain",
    "helpers.script.gpu_queries": "tight_fit.script.gpu_queries",
    "helpers.script.libraries": "tight_fit.script.libraries",
    "helpers.script.loaders": "tight_fit.script.loaders",
    "helpers.script.magic": "tight_fit.command.magic",
    "helpers.script.process": "tight_fit.script.process",
    "helpers.script.program": "tight_fit.script.program",
    "helpers.script.remedies": "tight_fit.script.remedies",
    "helpers.script.report": "tight_fit.script.report",
    "helpers.script.sandbox": "tight_fit.script.sandbox",
    "helpers.script.saving": "tight_fit.script.saving",
    "helpers.script.snapshot": "tight_fit.script.snapshot",
    "helpers.script.steps": "tight_fit.script.steps",
    "helpers.script.values": "tight_fit.script.values",
    "helpers.script.watch": "tight_fit.script.watch",
    "helpers.script.where": "tight_fit.script.where",
    "helpers.show.comparison": "helpers.show",
    "helpers.show.context_table": "helpers.plan_tables",
    "helpers.show.epoch": "helpers.show",
    "helpers.show.ladder_table": "helpers.plan_tables",
    "helpers.show.large_table": "helpers.plan_tables",
    "helpers.show.layout_table": "helpers.plan_tables",
    "helpers.show.moved_table": "helpers.show",
    "helpers.show.trainer_table": "by_hand.trainer_factors",
    "helpers.step": "tight_fit.techniques.step",
    "helpers.storage": "helpers.checkpoint",
    "helpers.storage.belongs": "helpers.checkpoint",
    "helpers.storage.folder": "helpers.state_file",
    "helpers.storage.model_state": "helpers.checkpoint",
    "helpers.storage.optimizer_state": "helpers.checkpoint",
    "helpers.storage.run_fields": "helpers.record_fields",
    "helpers.storage.state_file": "helpers.state_file",
    "helpers.strategy": "helpers.plan",
    "helpers.strategy.candidate": "tight_fit.search.layouts",
    "helpers.strategy.candidates": "tight_fit.search.space",
    "helpers.strategy.choose": "tight_fit.search.layouts",
    "helpers.strategy.cluster": "tight_fit.layouts.cluster",
    "helpers.strategy.command": "tight_fit.command.main",
    "helpers.strategy.fake_rank": "tight_fit.layouts.fake_rank",
    "helpers.strategy.ladder": "helpers.plan.ladder",
    "helpers.strategy.large_models": "helpers.plan.searches",
    "helpers.strategy.layout_facts": "tight_fit.layouts.facts",
    "helpers.strategy.layout_report": "tight_fit.command.layout_report",
    "helpers.strategy.long_context": "helpers.plan.long_context",
    "helpers.strategy.packed_trace": "helpers.plan.packed_trace",
    "helpers.strategy.plan_cache": "helpers.plan.plan_cache",
    "helpers.strategy.plan_layout": "tight_fit.layouts.plan",
    "helpers.strategy.plan_pipeline": "tight_fit.layouts.plan_pipeline",
    "helpers.strategy.plan_ranks": "tight_fit.layouts.plan",
    "helpers.strategy.plan_summary": "helpers.plan.plan_summary",
    "helpers.strategy.rank_time": "tight_fit.layouts.clocks",
    "helpers.strategy.search": "tight_fit.search.layouts",
    "helpers.strategy.search_experts": "tight_fit.search.experts",
    "helpers.strategy.search_report": "tight_fit.command.search_report",
    "helpers.strategy.search_space": "tight_fit.search.space",
    "helpers.strategy.show": "helpers.show",
    "helpers.strategy.step_time": "tight_fit.layouts.seconds",
    "helpers.strategy.techniques": "helpers.plan.techniques",
    "helpers.strategy.trace_layout": "tight_fit.layouts.trace",
    "helpers.strategy.trace_pipeline": "tight_fit.layouts.trace_pipeline",
    "helpers.sweeps.results": "helpers.sweeps",
    "helpers.sweeps.shown": "helpers.sweeps",
    "helpers.techniques": "tight_fit.techniques",
    "helpers.techniques.activation_offload": "tight_fit.techniques.activation_offload",
    "helpers.techniques.base_weights": "tight_fit.techniques.base_weights",
    "helpers.techniques.compiled": "tight_fit.techniques.compiled",
    "helpers.techniques.host": "tight_fit.techniques.host",
    "helpers.techniques.host_optimizer": "tight_fit.techniques.host_optimizer",
    "helpers.techniques.in_backward": "tight_fit.techniques.in_backward",
    "helpers.techniques.library_optimizers": "tight_fit.techniques.library_optimizers",
    "helpers.techniques.precision": "tight_fit.techniques.precision",
    "helpers.techniques.stochastic_rounding": "tight_fit.techniques.stochastic_rounding",
    "helpers.timing": "tight_fit.kernels",
    "helpers.timing.clock": "helpers.train",
    "helpers.timing.describe": "tight_fit.kernels.describe",
    "helpers.timing.host_memory": "tight_fit.kernels.host_memory",
    "helpers.timing.kernel_time": "tight_fit.kernels.kernel_time",
    "helpers.timing.names": "tight_fit.kernels.names",
    "helpers.timing.op": "tight_fit.kernels.op",
    "helpers.timing.packed_trace": "helpers.plan.packed_trace",
    "helpers.timing.products": "tight_fit.kernels.products",
    "helpers.timing.sizes": "tight_fit.kernels.sizes",
    "helpers.timing.specs": "tight_fit.gpus.specs",
    "helpers.timing.step_seconds": "tight_fit.kernels.step_seconds",
    "helpers.timing.trace_ops": "tight_fit.kernels.trace_ops",
    "helpers.torch_private": "tight_fit.torch_private",
    "helpers.units": "tight_fit.units",
    "helpers.values": "tight_fit.checks",
}
NAMES = {
    "helpers.data.balanced_order": "helpers.sets.balanced_order",
    "helpers.data.proportional_order": "helpers.sets.proportional_order",
    "helpers.packages.missing": "tight_fit.packages.missing",
    "helpers.packages.needs": "tight_fit.packages.needs",
    "helpers.plan.Fit": "tight_fit.memory.plan.Fit",
    "helpers.plan.Plan": "tight_fit.memory.plan.Plan",
    "helpers.plan.plan_custom_step": "tight_fit.plans.own_step.plan_custom_step",
    "helpers.plan.plan_model": "tight_fit.plans.model.plan_model",
}


def refuse(name: str) -> NoReturn:
    """Raises ImportError, in one sentence, for a module or a name that has another place today."""
    parts = {
        place if re.fullmatch(r"helpers\.\w+", place) else place.rpartition(".")[0]
        for old, place in PLACES.items()
        if old.startswith(f"{name}.")
    }
    place = ", ".join(sorted(parts)) if parts else (PLACES | NAMES)[name]
    raise ImportError(
        f"{name} is {'in ' if parts else ''}{place} today: import it from there.", name=name
    )


class Finder(MetaPathFinder):
    """Asked first of all, so that it answers for old parts of what is one module today."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target=None
    ) -> ModuleSpec | None:
        """None for what was never here. Raises ImportError for what has moved.

        Python asks nobody for a part of a module that is no package. So what was a package, as
        `helpers.data`, is called one still, without a folder.
        """
        if fullname in PLACES:
            refuse(fullname)
        if not any(old.startswith(f"{fullname}.") for old in PLACES):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.submodule_search_locations is None:
            spec.submodule_search_locations = []
        return spec


def watch() -> None:
    """Let imports of what has moved say where it is. Twice is as good as once."""
    if not any(type(finder).__name__ == Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
