"""Traces of steps that were planned before on this machine, which are not traced again.

A trace is what takes the time of a plan; memory, seconds on any GPU, and what would make a step fit
follow from it in milliseconds, without PyTorch. It is kept for one configuration, the versions of
the libraries, and this package's code; after a change of any of them it is not found.

Of well-known models lines through traces come with the package (`plans.trace_line`), which give
the trace at any batch size and at most lengths: `command.ship_traces` makes them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import lzma
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tight_fit.command import question
from tight_fit.command.kept import folder
from tight_fit.files import replace_all
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.models.step import ModelStep
from tight_fit.plans import batch_line
from tight_fit.plans.batch_line import Traced
from tight_fit.plans.other_optimizer import op_of, plain, with_adamw, with_optimizer
from tight_fit.plans.trace_line import TraceLine
from tight_fit.trace.storage_trace import StorageTrace

SHIPPED = Path(__file__).parent / "known" / "traces"
MOST = 40  # models of which traces are kept, and
OF_MODEL = 400  # traces of each, of some ten kilobytes; the oldest go first
PART = "+"  # before the digest of an optimizer's part, among those of lines


class KeptTraces:
    """Those of the model of one configuration.

    values  of its config.json
    """

    def __init__(self, values: dict[str, Any]):
        parts = [values, question.versions(), question.code()]
        self.values, self.folder = values, folder() / "traces" / question.digest(parts)

    def fact(self, name: str, make: Callable[[], Any]) -> Any:
        """What JSON holds of something that takes long to make; made where it is not kept."""
        if name in self._shipped.facts:
            return self._shipped.facts[name]
        kept = self._read(name)
        if not isinstance(kept, list) or len(kept) != 1:
            kept = [make()]
            self._write(name, kept)
        return kept[0]

    def find(self, key: tuple) -> Traced | None:
        """The trace of a step, by numbers and texts that tell it from the model's others."""
        kept = self._read(question.digest(key))
        with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
            return _unpacked(kept)
        return None

    def computed(self, device: str, step: ModelStep) -> Traced | None:
        """The trace of a step from what comes with the package, if there is enough of it: a line,
        or that of the step with fused AdamW and the part of its own optimizer. With TF32 the same
        kernels run as without."""
        if step.precision == "tf32":
            in_fp32 = self.computed(device, replace(step, precision="fp32"))
            return _in_tf32(in_fp32) if in_fp32 else None
        traced = self._on_line(step, device)
        if traced is not None:
            return traced
        body, like = with_adamw(step), plain(step)
        if body is None or like is None:
            return None
        part = self._shipped.part(question.digest(batch_line.general(like, device)))
        traced = self._on_line(body, device) if part else None
        return with_optimizer(traced, part, step.accumulation) if traced and part else None

    def _on_line(self, step: ModelStep, device: str) -> Traced | None:
        """The trace of a step from a line, None where there is none that reaches it."""
        for like, further in ((step, {}), batch_line.usual(step)):
            line = self._shipped.line(question.digest(batch_line.general(like, device)))
            if line is not None:
                return line.at((step.micro_batch, step.tokens), step.accumulation, further)
        return None

    @cached_property
    def _shipped(self) -> ShippedLines:
        return ShippedLines.of(self.values)

    def keep(self, key: tuple, traced: Traced) -> None:
        """Keep it. A folder that cannot be written keeps nothing, and that is no error."""
        self._write(question.digest(key), _packed(traced))

    def _read(self, name: str) -> Any:
        try:
            text = (self.folder / name).read_text(encoding="ascii")
            return json.loads(zlib.decompress(base64.b85decode(text)))
        except (OSError, ValueError, zlib.error):  # there is none, or it is damaged
            return None

    def _write(self, name: str, value: Any) -> None:
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)
        with contextlib.suppress(OSError):
            replace_all(self.folder, {name: base64.b85encode(data).decode()})
            for file in _oldest(self.folder, OF_MODEL):
                file.unlink(missing_ok=True)
            for model in _oldest(self.folder.parent, MOST):
                shutil.rmtree(model, ignore_errors=True)


class ShippedLines:
    """What comes with the package of one model: `facts`, and lines through traces of its steps.

    head   {"model", "versions", "facts"}
    lines  {digest of what steps have in common: a line, as JSON}; of an optimizer's part after
           `PART` the digest of the plain step that it is from
    rows   what lines have in place of their numbers are places of this list
    """

    def __init__(self, head: dict[str, Any], lines: dict[str, str], rows: Sequence[Any] = ()):
        self.facts: dict[str, Any] = head.get("facts", {})
        self.lines, self.rows = lines, rows
        self._read: dict[str, TraceLine] = {}

    @classmethod
    def of(cls, values: dict[str, Any], stale: bool = False) -> ShippedLines:
        """Those of a model, none where they are not there or of other versions of the libraries.

        stale  also those of other versions
        """
        with contextlib.suppress(OSError, ValueError, lzma.LZMAError):
            text = lzma.decompress(place_of(values).read_bytes()).decode("ascii")
            first, rows, *rest = text.splitlines()
            head = json.loads(first)
            if stale or _releases(head["versions"]) == _releases(question.versions()):
                return cls(head, dict(line.split(" ", 1) for line in rest), json.loads(rows))
        return cls({}, {})

    def line(self, key: str) -> TraceLine | None:
        """The line of steps that have the same `plans.batch_line.general`."""
        if key in self.lines and key not in self._read and not key.startswith(PART):
            self._read[key] = TraceLine(_long(json.loads(self.lines[key]), self.rows))
        return self._read.get(key)

    def part(self, key: str) -> dict[str, Any] | None:
        """The part of an optimizer, of steps whose `plans.other_optimizer.plain` is the same."""
        text = self.lines.get(PART + key)
        return None if text is None else json.loads(text)

    @staticmethod
    def write(
        values: dict[str, Any],
        head: dict[str, Any],
        lines: dict[str, TraceLine],
        parts: Mapping[str, dict[str, Any]],
    ) -> None:
        """Keep them with the package, whole or not at all."""
        rows: dict[tuple[int, ...], int] = {}
        packed = {key: _short(line.packed, rows) for key, line in lines.items()}
        packed |= {PART + key: part for key, part in parts.items()}
        text = [json.dumps(head), json.dumps(list(rows), separators=(",", ":"))]
        for key, value in packed.items():
            text.append(f"{key} {json.dumps(value, separators=(',', ':'))}")
        place = place_of(values)
        place.parent.mkdir(exist_ok=True)
        unfinished = place.with_suffix(".unfinished")
        data = "\n".join(text).encode("ascii")
        unfinished.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
        unfinished.replace(place)


def _in_tf32(traced: Traced) -> Traced:
    """The trace of a step in fp32 as that of the step with TF32."""
    trace, parameters = traced
    assert trace.operations is not None, "every line has them"
    return replace(trace, operations=replace(trace.operations, tf32=True)), parameters


def place_of(values: dict[str, Any]) -> Path:
    """Where lines of the model of a config.json are, if they come with the package."""
    return SHIPPED / f"{question.digest(values)[:16]}.xz"


def _short(packed: Mapping[str, Any], rows: dict[tuple[int, ...], int]) -> dict[str, Any]:
    """A line with numbers of `rows` in place of its numbers, which many storages and lines have in
    common; those that are missing are added. Along a further axis places are steps ahead."""

    def places(columns: list[list[int]]) -> list[int]:
        return [rows.setdefault(row, len(rows)) for row in zip(*columns)]

    short = {**packed, "numbers": places(packed["numbers"])}
    if "axes" in packed:
        short["axes"] = {
            name: axis
            | {
                "of": [end - start for start, end in pairwise([0, *axis["of"]])],
                "numbers": places(axis["numbers"]),
            }
            for name, axis in packed["axes"].items()
        }
    return short


def _long(short: dict[str, Any], rows: Sequence[Any]) -> dict[str, Any]:
    """What `_short` has made short."""
    for part in (short, *short.get("axes", {}).values()):
        part["numbers"] = list(zip(*(rows[place] for place in part["numbers"])))
    for axis in short.get("axes", {}).values():
        axis["of"] = list(accumulate(axis["of"]))
    return short


def _releases(versions: dict[str, str]) -> dict[str, str]:
    """Versions without what PyTorch was built for: plans are the same."""
    return {name: version.split("+")[0] for name, version in versions.items()}


def _oldest(place: Path, most: int) -> list[Path]:
    """What lies in a folder beyond the newest, unfinished files left out."""
    there = [file for file in place.iterdir() if not file.name.startswith(".")]
    there.sort(key=lambda file: file.stat().st_mtime)
    return there[: max(0, len(there) - most)]


def _packed(traced: Traced) -> dict[str, Any]:
    """A trace as JSON holds it, in columns."""
    trace, parameters = traced
    operations, names = trace.operations, list(dict.fromkeys(trace.made_by))
    number = {name: index for index, name in enumerate(names)}
    return {
        "parameters": parameters,
        "bytes": trace.bytes,
        "names": names,
        "made_by": [number[name] for name in trace.made_by],
        "events": list(zip(*trace.events)),
        "begin": trace.begin,
        "reached": sorted(trace.reached),
        "flops": trace.flops,
        "operations": None
        if operations is None
        else {
            "ops": operations.ops,
            "order": list(zip(*operations.order)),
            "again": operations.again,
            "tf32": operations.tf32,
            "unknown": operations.unknown,
            "passes": operations.passes,
        },
    }


def _unpacked(kept: dict[str, Any]) -> Traced:
    """The trace. Raises KeyError, TypeError, ValueError or IndexError for what holds none."""
    names, operations = kept["names"], kept["operations"]
    traced = None
    if operations is not None:
        traced = TracedOps(
            [tuple(op_of(op) for op in kernels) for kernels in operations["ops"]],
            list(zip(*operations["order"])),
            tuple(operations["again"]),
            operations["tf32"],
            operations["unknown"],
            tuple(operations["passes"]),
        )
    trace = StorageTrace(
        kept["bytes"],
        [names[number] for number in kept["made_by"]],
        list(zip(*kept["events"])),
        kept["begin"],
        frozenset(kept["reached"]),
        kept["flops"],
        traced,
    )
    return trace, kept["parameters"]
