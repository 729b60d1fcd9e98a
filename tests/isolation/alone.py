"""`python -m tests.isolation.alone BEFORE DEED MARK`: a deed in an isolated copy of this process.

BEFORE runs in this process, and the deed in the copy, which sees its names. With "" for MARK the
deed runs in this process instead, and with one that begins with "folder" in a copy that writes
into a copy of its folder. The exit status is the copy's.
"""

import os
import sys
import traceback

from tight_fit import isolation


def main(before: str, deed: str, mark: str) -> int:
    names: dict = {}
    exec(before, names)
    if mark.startswith("folder"):
        child = isolation.fork_on_copy()
    else:
        child = isolation.fork(files=1 << 26) if mark else os.fork()
    if not child:
        try:
            exec(deed, names)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
