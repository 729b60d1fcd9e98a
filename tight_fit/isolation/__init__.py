"""A copy of this process that changes nothing outside itself, whoever does the writing.

`fork` is `os.fork` inside Linux' namespaces: the copy reads every file that is here and writes into
memory that goes with it (`places`), reaches no network (`calls`), and ends with all that it started
when its parent ends (`process`) or where they take too much (`limits`). What this process has open
is cut off from it (`inherited`). Where namespaces are refused, `fork_on_copy` lets it write into a
throw-away copy of its folder (`copied`, `mirror`), and nowhere else (`landlock`); `end` ends it.
"""

from tight_fit.isolation.copied import end
from tight_fit.isolation.copied import fork as fork_on_copy
from tight_fit.isolation.limits import TASKS, TOO_FULL, TOO_LARGE, TOO_MANY
from tight_fit.isolation.process import Unavailable, fork, why_not

__all__ = ["TASKS", "TOO_FULL", "TOO_LARGE", "TOO_MANY", "Unavailable"]
__all__ += ["end", "fork", "fork_on_copy", "why_not"]
