"""What the notebooks share: recipes, data, models, training, measuring, tables and plots.

The planner is the package `tight_fit`, which this one imports and which imports nothing of it.
"""

import tight_fit
from helpers import moved

__version__ = tight_fit.__version__
moved.watch()


def __getattr__(name: str):
    if f"{__name__}.{name}" in moved.PLACES:
        moved.refuse(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell) -> None:
    """`%load_ext helpers` was the magic's name. Raises ImportError, in one sentence."""
    raise ImportError("The magic %%plan is loaded by %load_ext tight_fit today.")
