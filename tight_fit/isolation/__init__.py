"""A copy of this process that changes nothing outside itself, whoever does the writing.

`fork` is `os.fork` inside Linux' namespaces: the copy reads every file that is here and writes into
memory that goes with it (`places`), reaches no network (`calls`), and ends with all that it started
when its parent ends (`process`) or where they take too much (`limits`). What this process has open
is cut off from it (`inherited`).
"""

from tight_fit.isolation.limits import TASKS, TOO_LARGE, TOO_MANY
from tight_fit.isolation.process import Unavailable, fork, why_not

__all__ = ["TASKS", "TOO_LARGE", "TOO_MANY", "Unavailable", "fork", "why_not"]
