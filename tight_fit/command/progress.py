"""One line that says what is being done while an answer is made."""

from __future__ import annotations

import sys


class Progress:
    """One line on stderr that says what is being done, where stderr is a terminal."""

    def __init__(self):
        self.shows, self.width = sys.stderr.isatty(), 0

    def say(self, words: str) -> None:
        """Replace the line."""
        if self.shows:
            print(f"\r{words + ' ...':{self.width}}", end="", file=sys.stderr, flush=True)
            self.width = len(words) + 4

    def clear(self) -> None:
        """Take the line away."""
        if self.width:
            print(f"\r{'':{self.width}}\r", end="", file=sys.stderr, flush=True)
            self.width = 0
