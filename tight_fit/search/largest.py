"""The largest number that fits, in few looks: a search along a line that has steps."""

from __future__ import annotations

from collections.abc import Callable

LIMIT = 2**20  # examples per micro-batch; larger ones are not searched for


def largest_that_fits(over: Callable[[int], float], start: int) -> int:
    """The largest whole number that fits; 0 if not even 1 does, at most LIMIT - 1.

    over   how far a number is beyond the limit; it fits if this is not positive. It is nearly a
           line: bytes grow with each example, and in jumps with the allocator's segments
    start  a first guess, at least 1; a good one needs two to four looks
    """
    search = _Search(over)
    search.bracket(min(start, LIMIT - 1))
    search.narrow()
    return search.low


class _Search:
    """`low` fits (or is 0), `high` does not (or is LIMIT); every look is between the two."""

    def __init__(self, over: Callable[[int], float]):
        self.over, self.low, self.high = over, 0, LIMIT
        self.seen: dict[int, float] = {}

    def look(self, number: int) -> bool:
        """Whether a number fits; it becomes the new `low` or `high`."""
        self.seen[number] = self.over(number)
        fits = self.seen[number] <= 0
        if fits:
            self.low = number
        else:
            self.high = number
        return fits

    def bracket(self, start: int) -> None:
        """Find a number that fits and one that does not, not far from each other."""
        upwards = self.look(start)
        direction = 1 if upwards else -1
        # A first guess that is right is known to be right after its neighbour.
        if self.high - self.low <= 1 or self.look(start + direction) != upwards:
            return
        # The line through the two says about where the limit is. Without one, double or halve.
        aim = self._crossing(*sorted((start, start + direction)))
        step = 1
        if aim is None:
            aim = 2 * start if upwards else start // 2
            step = max(1, abs(aim - start))
        guess = max(aim, self.low + 1) if upwards else min(aim, self.high - 1)
        while self.low < guess < self.high and self.look(guess) == upwards:
            guess += direction * step
            step *= 2

    def narrow(self) -> None:
        """Interpolate as long as this at least halves what is left; from then on, halve."""
        line_is_good = True
        while self.high - self.low > 1:
            width = self.high - self.low
            crossing = self._crossing(self.low, self.high) if line_is_good else None
            if crossing is None:
                self.look((self.low + self.high) // 2)
                continue
            guess = min(max(crossing, self.low + 1), self.high - 1)
            neighbour = guess + (1 if self.look(guess) else -1)
            if self.low < neighbour < self.high:
                self.look(neighbour)
            line_is_good = self.high - self.low <= width // 2

    def _crossing(self, first: int, second: int) -> int | None:
        """Where the line through two points reaches the limit, rounded down; None if nowhere."""
        if first not in self.seen or second not in self.seen:
            return None
        at_first, at_second = self.seen[first], self.seen[second]
        if at_second <= at_first:
            return None
        return int(first - at_first * (second - first) / (at_second - at_first))
