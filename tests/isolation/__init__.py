"""Which processes there are."""

import psutil


def with_mark(mark: str) -> list[psutil.Process]:
    """The processes whose command line holds a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
