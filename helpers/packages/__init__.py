"""The packages that notebooks use: which are installed, how to get them, what to do without them.

Nothing here imports anything outside Python itself before it is called: the first cell of a
notebook runs it before torch, and where packages are missing.
"""

from tight_fit.packages import missing, needs

__all__ = ["missing", "needs"]
