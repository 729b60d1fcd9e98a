"""What the notebooks share: recipes, data, models, training, planning, measuring and plots."""

import logging
from importlib import import_module

__version__ = "0.2.0.dev0"  # the only place of the version; CHANGELOG.md says what is in it

# When bitsandbytes is imported, it warns that some CPUs lack a kernel for 4-bit products. Nothing
# here needs that kernel.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def load_ipython_extension(shell) -> None:
    """`%load_ext helpers`: the magic `%%plan`, which plans a cell's training."""
    shell.register_magics(import_module(f"{__name__}.script.magic").PlanMagics)
