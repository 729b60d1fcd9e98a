"""Whether a downloaded file is what its name says, found from its first and last bytes.

A copy of a repository by `git clone` without git-lfs holds small text files in place of the large
ones, a copy that broke off holds half a file, and libraries meet both with errors that name neither
the file nor the reason. Formats: safetensors (https://github.com/huggingface/safetensors), Parquet
(https://parquet.apache.org/docs/file-format), sentencepiece's ModelProto (a Protocol Buffer).
"""

from __future__ import annotations

import json
from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/"
LONGEST_HEADER = 100 * 2**20  # bytes of a safetensors header, the library's own limit


def fault(path: Path) -> str | None:
    """What is wrong with a file, as the end of a sentence that begins with its name; else None.

    Looks at the end of the name: .safetensors, .json, .jsonl, .parquet and .model are known, and
    of any other file only that it is there, not empty and no pointer. Reads no tensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not size:
        return "is empty"
    if start.startswith(POINTER):
        return "is a pointer of git-lfs and not the file itself: run `git lfs pull` there"
    look = {
        ".safetensors": _safetensors,
        ".json": _json,
        ".jsonl": _json_lines,
        ".parquet": _parquet,
        ".model": _sentencepiece,
    }.get(path.suffix)
    return look(path, size) if look else None


def _safetensors(path: Path, size: int) -> str | None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            return "is no safetensors file, or broke off: fetch it again"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
            whole = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return "is no safetensors file: its header cannot be read; fetch it again"
    if size != whole:
        return f"has {size:,} bytes, and its header says {whole:,}: fetch it again"
    return None


def _json(path: Path, size: int) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf8"))
    except (ValueError, RecursionError):
        return "is no JSON that can be read: fetch it again"
    return None if isinstance(content, dict) else "holds no JSON object: fetch it again"


def _json_lines(path: Path, size: int) -> str | None:
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), None)
        if first is None:
            return "holds no rows: fetch it again"
        file.seek(size - 1)
        whole = file.read(1) in b"\n}"
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        return "has no JSON object in its first line: fetch it again"
    return None if whole else "broke off in its last line: fetch it again"


def _parquet(path: Path, size: int) -> str | None:
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, size - 4))
        end = file.read(4)
    if start == end == b"PAR1" and size >= 12:
        return None
    return "is no Parquet file, or broke off: fetch it again"


def _sentencepiece(path: Path, size: int) -> str | None:
    """A ModelProto is a row of fields: each a tag, a length, its bytes. The first is a piece."""
    data = path.read_bytes()
    place, first = 0, data[0]
    try:
        while place < size:
            tag, place = _varint(data, place)
            if tag & 7 == 2:
                length, place = _varint(data, place)
                place += length
            elif tag & 7 == 0:
                _, place = _varint(data, place)
            else:
                place += {1: 8, 5: 4}[tag & 7]
    except (IndexError, KeyError):
        first = -1
    if first == 0x0A and place == size:
        return None
    return "is no sentencepiece model, or broke off: fetch it again"


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """(a number of a Protocol Buffer, the place after it)."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
