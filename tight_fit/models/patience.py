"""Waiting for a download as long as something comes, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Fetched = TypeVar("Fetched")
LOOK_SECONDS = 0.5  # between two looks at what has come


class StoodStill(TimeoutError):
    """Nothing came for so long that the other side counts as silent."""


def while_it_grows(fetch: Callable[[], Fetched], folder: Path, seconds: float) -> Fetched:
    """What `fetch()` gives, as long as the files below `folder` grow.

    Libraries limit how long a single read may take, and read again and again from a server that
    never says anything of use. So this looks at what has arrived.

    seconds  without a new byte, after which the wait ends; the thread of `fetch` is left behind
    Raises StoodStill, and whatever `fetch` raises.
    """
    given: list[Fetched] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            given.append(fetch())
        except BaseException as error:  # raised again below, in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    arrived, since = _bytes_in(folder), time.monotonic()
    while True:
        thread.join(LOOK_SECONDS)
        if raised:
            raise raised[0]
        if not thread.is_alive():
            return given[0]
        now = _bytes_in(folder)
        if now != arrived:
            arrived, since = now, time.monotonic()
        elif time.monotonic() - since > seconds:
            raise StoodStill(f"nothing came for {seconds:g} seconds")


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # gone, or a link to nothing
            continue
    return total
