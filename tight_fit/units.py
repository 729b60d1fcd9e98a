"""Bytes, counts and seconds as text for a reader."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size(count: float | None) -> str:
    """Bytes with the binary unit that suits them: 9.37 GiB, 13.2 MiB, 512 bytes; "n/a" for None."""
    if count is None:
        return "n/a"
    # From where on each is used: what rounds to 1024.0 of the unit below is one of this unit.
    begins = {GIB: 1023.95 * MIB, MIB: 1023.95 * KIB, KIB: KIB}
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(count) >= begins[unit]:
            return f"{count / unit:.{digits}f} {name}"
    return f"{count:.0f} bytes"


def number(count: float | None) -> str:
    """A large count in three figures: 184 M, 2.48 T; "n/a" for None."""
    if count is None:
        return "n/a"
    for unit, name in ((10**12, " T"), (10**9, " G"), (10**6, " M"), (10**3, " k")):
        if abs(count) >= 0.9995 * unit:  # which is 1000 of the unit below in three figures
            return _figures(count / unit) + name
    return f"{count:.3g}"


def _figures(count: float) -> str:
    """Three figures, and all of those before the point."""
    return f"{count:.3g}" if abs(count) < 999.5 else f"{count:.0f}"


def size_line(name: str, count: float | None, width: int = 20) -> str:
    """A line of a table of sizes: a name, and bytes."""
    return f"  {name:{width}} {size(count):>12}"


def a_gpu(name: str) -> str:
    """A GPU's name with its article, as letters are spoken: a T4, an A100, a GPU of 8GB."""
    if name[0].isdigit():
        return f"a GPU of {name}"
    return f"{'an' if name[0] in 'AHLMR' else 'a'} {name}"


def several(count: int, word: str) -> str:
    """A count and a regular noun: "1 example", "16 examples"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def duration(seconds: float | None) -> str:
    """Seconds as 85 ms, 1.3 s or 2 min 05 s; "n/a" for None."""
    if seconds is None:
        return "n/a"
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{seconds * 1000:.0f} ms"


def span(seconds: float) -> str:
    """Seconds in three figures, also those of a short step: 0.494 ms, 85.0 ms, 1.3 s."""
    if seconds >= 0.9995:
        return duration(seconds)
    return f"{seconds * 1e3:#.3g}".rstrip(".") + " ms"
