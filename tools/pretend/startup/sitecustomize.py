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
# {module: the function of tools.pretend.hooks that changes it, "" where only its import differs}
CHANGED = {
    "torch": "after_torch",
    "torch.distributed.distributed_c10d": "after_distributed",
    "torch._dynamo.trace_rules": "after_trace_rules",
    "torch._inductor.compile_fx": "after_inductor",
    "bitsandbytes": "",
    "benchmarks.room": "after_room",
    "helpers": "after_helpers",
    "tight_fit.gpus": "after_gpus",
    "helpers.recipe": "after_recipe",
    "helpers.models": "after_models",
    "helpers.plan": "after_plan",
    "helpers.profile": "after_profile",
    "tight_fit.techniques.step": "after_step",
    "helpers.train": "after_train",
    "helpers.record": "after_record",
    "helpers.measure": "after_measurement",
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do; `tools.pretend.hooks` changes those of `CHANGED`."""

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
            if CHANGED[fullname]:
                getattr(hooks, CHANGED[fullname])(module)

        vars(spec.loader)["exec_module"] = then  # of this loader only, not of its class
        return spec


if os.environ.get("TIGHT_FIT_REHEARSAL", "").strip():
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # behind what the process itself puts there
    sys.meta_path.insert(0, AfterImport())
