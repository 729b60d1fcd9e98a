"""A copy of this process that changes nothing outside itself, whoever does the writing.

`fork` is `os.fork` inside Linux' namespaces: the copy reads every file that is here and writes into
memory that goes with it (`places`), reaches no network, and ends with all that it started when its
parent ends (`process`). What this process has open is cut off from it (`inherited`).
"""

from tight_fit.isolation.process import Unavailable, fork, why_not

__all__ = ["Unavailable", "fork", "why_not"]
