"""Bytes, counts and seconds as text for a reader."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size(count: float | None) -> str:
    """Bytes with the binary unit that suits them: 9.37 GiB, 13.2 MiB, 512 bytes; "n/a" for None."""
    if count is None:
        return "n/a"
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(count) >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return f"{count:.0f} bytes"


def number(count: float | None) -> str:
    """A large count in three figures: 184 M, 2.48 T; "n/a" for None."""
    if count is None:
        return "n/a"
    for unit, name in ((10**12, " T"), (10**9, " G"), (10**6, " M"), (10**3, " k")):
        if abs(count) >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:.3g}"


def several(count: int, word: str) -> str:
    """A count and a regular noun: "1 example", "16 examples"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def duration(seconds: float | None) -> str:
    """Seconds as 85 ms, 1.3 s or 2 min 05 s; "n/a" for None."""
    if seconds is None:
        return "n/a"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {round(seconds % 60):02d} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
