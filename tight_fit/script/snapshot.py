"""PyTorch's memory snapshot of a GPU (`torch.cuda.memory._dump_snapshot`), read as plain data.

The file is a pickle. A pickle may name any function to be called, so it is read by a reader that
knows none: dictionaries, lists, texts and numbers are all that it can give.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tight_fit.checks import whole

ALLOC, FREE, OOM = "alloc", "free_completed", "oom"
LIBRARY = re.compile(r"site-packages|dist-packages|[/\\]lib[/\\]python3|^<|\?\?|^torch[/\\]|^$")
# What was running when memory was taken: (category, function's name, part of the file's name), the
# first that matches a frame counts, from the innermost frame outwards.
RULES = (
    ("optimizer states and temporaries", r".", r"torch[/\\]optim|bitsandbytes[/\\]optim"),
    ("gradients and the backward pass", r"^backward$|_engine_run_backward", r"torch[/\\]autograd"),
    (
        "weights",
        r"^(_apply|convert|cuda|to|from_pretrained|__init__)$",
        r"nn[/\\]modules[/\\]|model",
    ),
    ("activations", r"^forward$|_call_impl", r"."),
)
MOST_BYTES = 2**50  # of one tensor, or of a GPU
OTHER = "other"
UNKNOWN = "not recorded"


class _PlainData(pickle.Unpickler):
    """A reader of pickles that calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(
            f"it asks for {module}.{name}, and a memory snapshot holds plain data only"
        )

    def persistent_load(self, key: Any) -> NoReturn:
        raise ValueError("it refers to data outside, and a memory snapshot holds plain data only")


@dataclass(frozen=True)
class Block:
    """Memory that a tensor held. `line` is the program's own, "" where none was recorded."""

    bytes: int
    category: str
    line: str


@dataclass(frozen=True)
class InUse:
    """What a GPU's allocator held when it held most, or when memory was not to be had.

    blocks   everything that was allocated
    asked    bytes that could not be had; 0 where the recording has no such event
    free     bytes that the GPU had free then
    reserved bytes that the allocator had taken from the GPU at the end of the recording
    """

    blocks: tuple[Block, ...]
    asked: int
    free: int
    reserved: int

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return sum(block.bytes for block in self.blocks)


def read(path: str | Path) -> dict[str, Any]:
    """The snapshot in a file. Raises ValueError or OSError, in one sentence, for another file."""
    if not Path(path).is_file():
        why = "is a folder" if Path(path).is_dir() and str(path) else "is not there"
        raise FileNotFoundError(f"{str(path)!r} {why}: name the file of a memory snapshot.")
    with open(path, "rb") as file:
        try:
            held = _PlainData(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError) as error:
            raise ValueError(f"{path} is no memory snapshot of PyTorch: {_short(error)}.") from None
        except (ValueError, TypeError, MemoryError, OverflowError) as error:
            raise ValueError(f"{path} is not read: {_short(error)}.") from None
    if not (isinstance(held, dict) and isinstance(held.get("segments"), list)):
        raise ValueError(
            f"{path} is no memory snapshot of PyTorch: write one with "
            "torch.cuda.memory._dump_snapshot."
        )
    return held


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")[:200]
    return text if isinstance(error, (ValueError, pickle.UnpicklingError)) else repr(error)[:200]


def moment(snapshot: dict[str, Any]) -> InUse:
    """The moment at which memory was not to be had, else that of most memory in use.

    From the blocks in use at the end the recorded events are undone, the last one first. Raises
    ValueError for a snapshot without memory in use, or whose fields are not PyTorch's.
    """
    try:
        found = _moment(snapshot)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"the snapshot lacks what PyTorch writes into one ({_short(error)})."
        ) from None
    if not found.blocks:
        raise ValueError(
            "the snapshot holds no memory in use: take it when memory is short, after "
            "torch.cuda.memory._record_memory_history()."
        )
    return found


def _moment(snapshot: dict[str, Any]) -> InUse:
    segments = snapshot["segments"]
    device = max(segments, key=lambda s: s["total_size"])["device"] if segments else 0
    segments = [segment for segment in segments if segment["device"] == device]
    traces = snapshot.get("device_traces") or []
    trace = traces[device] if device < len(traces) else []
    alive: dict[int, Block] = {}
    for segment in segments:
        address = segment.get("address", 0)
        for block in segment["blocks"]:
            if str(block["state"]).startswith("active"):
                alive[block.get("address", address)] = _block(block)
            address += block["size"]
    total = sum(block.bytes for block in alive.values())
    made: dict[int, dict[str, Any]] = {}  # event that allocated -> by the position of its end
    open_: dict[int, dict[str, Any]] = {}
    for position, event in enumerate(trace):
        if event["action"] == ALLOC:
            open_[event["addr"]] = event
        elif event["action"] == FREE and event["addr"] in open_:
            made[position] = open_.pop(event["addr"])
    reserved = sum(_bytes(segment["total_size"]) for segment in segments)
    best, most = dict(alive), total
    for position in range(len(trace) - 1, -1, -1):
        event = trace[position]
        if event["action"] == OOM:
            free = _bytes(event.get("device_free", event.get("addr", 0)))
            return InUse(tuple(alive.values()), _bytes(event["size"]), free, reserved)
        if event["action"] == ALLOC:
            gone = alive.pop(event["addr"], None)
            total -= gone.bytes if gone else 0
        elif event["action"] == FREE:
            alive[event["addr"]] = _block(made.get(position, event))
            total += alive[event["addr"]].bytes
            if total > most:
                best, most = dict(alive), total
    return InUse(tuple(best.values()), 0, 0, reserved)


def _block(event: dict[str, Any]) -> Block:
    frames = event.get("frames") or []
    return Block(_bytes(event["size"]), _category(frames), _line(frames))


def _bytes(count: Any) -> int:
    """Raises TypeError or ValueError for what is no number of bytes."""
    return whole("size", count, 0, MOST_BYTES)


def _category(frames: list[dict[str, Any]]) -> str:
    if not frames:
        return UNKNOWN
    for category, function, file in RULES:
        for frame in frames:
            if re.search(function, frame["name"]) and re.search(file, frame["filename"]):
                return category
    return OTHER


def _line(frames: list[dict[str, Any]]) -> str:
    """The innermost line that is in no library."""
    for frame in frames:
        if not LIBRARY.search(frame["filename"]) and frame["filename"].endswith((".py", ">")):
            return f"{Path(frame['filename']).name}:{frame['line']}"
    return ""
