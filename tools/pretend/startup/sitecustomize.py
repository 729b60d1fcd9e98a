"""Puts a pretended GPU into every Python process that starts with this folder on PYTHONPATH.

TIGHT_FIT_REHEARSAL says which one (tools.pretend.cards); without it nothing happens. The library is
loaded before torch, and each module below is changed right after it has been imported.
"""

import importlib
import importlib.abc
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# {module: the function of tools.pretend that changes it, "" where only its import differs}
CHANGED = {
    "torch": "hooks.change_torch",
    "torch.distributed.distributed_c10d": "nccl.install",
    "torch._dynamo.trace_rules": "hooks.change_trace_rules",
    "torch._inductor.compile_fx": "hooks.change_inductor",
    "bitsandbytes": "",
    "benchmarks.room": "true_size.change_room",
    "helpers": "hooks.change_helpers",
    "tight_fit.gpus": "hooks.change_gpus",
    "helpers.recipe": "narrow.change_recipe",
    "helpers.models": "narrow.change_models",
    "helpers.plan": "narrow.change_plan",
    "helpers.profile": "narrow.change_profile",
    "tight_fit.techniques.step": "true_size.change_step",
    "helpers.train": "narrow.change_train",
    "helpers.record": "narrow.change_record",
    "helpers.measure": "narrow.change_measure",
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do; those of `CHANGED` are then changed."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in CHANGED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def then(module):
            hooks = importlib.import_module("tools.pretend.hooks")
            with hooks.around(fullname):
                load(module)
            place, _, change = CHANGED[fullname].partition(".")
            if change:  # only now, as it imports some of the modules that are changed here
                getattr(importlib.import_module(f"tools.pretend.{place}"), change)(module)

        vars(spec.loader)["exec_module"] = then  # of this loader only, not of its class
        return spec


if os.environ.get("TIGHT_FIT_REHEARSAL", "").strip():
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # behind what the process itself puts there
    sys.meta_path.insert(0, AfterImport())
