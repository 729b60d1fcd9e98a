"""The file that `tight-fit calibrate` writes and that plans take from then on: one GPU, measured.

It is plain JSON, so that a reader can send it. Plans of the GPU that it names take its rates in
place of the table's; plans of others do not look at them. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from tight_fit.checks import shown
from tight_fit.files import of_user, small_text
from tight_fit.gpus.own import described
from tight_fit.gpus.rates import BOUNDS, Moving, Product, Rates
from tight_fit.gpus.table import GPU, GpuSpecs

FORMAT = "tight-fit calibration 1"
VARIABLE = "TIGHT_FIT_CALIBRATION"  # a file, or NONE
NONE = "none"
# Names the pretended GPU of a rehearsal (tools/pretend): what is written then is no record, and
# times are those of a CPU.
REHEARSAL = "TIGHT_FIT_REHEARSAL"
MOST = 4 * 2**20  # bytes of a file that are read
# The figures of a GPU that the rates are shares of.
FIGURES = ("sms", "lanes", "clock", "bandwidth", "l2", "tf32", "fp16", "bf16")
TENSOR = ("tf32", "fp16", "bf16")
PRODUCTS = ("linear", "batched", *TENSOR)
_chosen: list[str] = []  # the innermost choice last


class Calibration(NamedTuple):
    """A GPU that was measured.

    gpu    as plans name it, with its memory
    specs  its figures and, in `specs.rates`, what it reaches
    path   of the file
    """

    gpu: GPU
    specs: GpuSpecs
    path: Path


def usual_place() -> Path:
    """Where the file is looked for and written, where nothing else is said."""
    return (
        of_user("XDG_CONFIG_HOME", "~/Library/Application Support", "~/.config")
        / "calibration.json"
    )


@contextmanager
def chosen(name: str | None) -> Iterator[None]:
    """Inside, plans take this file, or no file for "none"; None changes nothing."""
    if name is None:
        yield
        return
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def active() -> Calibration | None:
    """The calibration that plans take, None where there is none.

    It is the file of `chosen`, else that of the environment variable, else the one in the usual
    place. Raises ValueError, in one sentence, where the file is not to be used, and OSError where
    one that was named cannot be read.
    """
    named = _chosen[-1] if _chosen else os.environ.get(VARIABLE, "").strip()
    if named == NONE:
        return None
    path = Path(named or usual_place())
    try:
        written = path.stat().st_mtime_ns
    except OSError as error:
        if named:
            raise FileNotFoundError(
                f"{named} cannot be read ({error.strerror}): name a file of tight-fit calibrate, "
                f"or {NONE}."
            ) from None
        return None
    return _read(path, written)


@cache
def _read(path: Path, written: int) -> Calibration:
    return read(path)


def of_gpu(name: str) -> GpuSpecs | None:
    """The measured figures of a GPU, None where no calibration of it is active."""
    found = active()
    return found.specs if found is not None and found.gpu.name == name else None


def read(path: Path) -> Calibration:
    """The calibration of a file. Raises ValueError, in one sentence, for any other file."""
    again = f"measure again with tight-fit calibrate, or plan with --calibration {NONE}"
    try:
        values = json.loads(small_text(path, MOST))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: {again}.") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is no JSON from line {error.lineno} on, as if cut off or edited: {again}."
        ) from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read: {again}.") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of this tight-fit calibrate: {again}.")
    try:
        if values["made"].get("rehearsal") and not os.environ.get(REHEARSAL):
            raise ValueError("it is of a pretended GPU")
        return Calibration(_gpu(values["gpu"]), _specs(values), path)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else "its parts are not there"
        raise ValueError(f"{path} is not whole ({what}): {again}.") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be used ({str(error).rstrip('.')}): {again}.") from None


def _gpu(values: Mapping[str, Any]) -> GPU:
    major, minor = values["capability"]
    name, memory = values["name"], values["memory"]
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(f"name={shown(name)} must be a text of one line")
    if type(memory) is not int or not 2**20 <= memory <= 2**50:
        raise ValueError(f"memory={shown(memory)} must be a number of bytes")
    if type(major) is not int or type(minor) is not int or not (1 <= major <= 20 and minor >= 0):
        raise ValueError(f"capability={shown(values['capability'])} is that of no GPU")
    return GPU(name, memory, (major, minor))


def _specs(values: Mapping[str, Any]) -> GpuSpecs:
    figures, like = values["specs"], values["specs"]["like"]
    given = {name: figures[name] for name in FIGURES}
    specs = described(values["gpu"]["name"], **given, like=like)
    found = values["rates"]
    date = found["date"]
    if not isinstance(date, str) or len(date) > 40 or not date.isprintable():
        raise ValueError(f"date={shown(date)} must be a date")
    rates = Rates(
        _moving(found["moving"]),
        linear=_product(found["linear"]),
        batched=_product(found["batched"]),
        tf32=found["tf32"] and _product(found["tf32"]),
        fp16=found["fp16"] and _product(found["fp16"]),
        bf16=found["bf16"] and _product(found["bf16"]),
        attention=_rate("attention", found["attention"]),
        dispatch=_rate("dispatch", found["dispatch"]),
        link=_rate("link", found["link"]),
        date=date,
        **_later(found),
    )
    for name in TENSOR:
        if getattr(specs, name) and getattr(rates, name) is None:
            raise ValueError(f"its products in {name} were not measured")
    fp8 = 2 * specs.bf16 if _gpu(values["gpu"]).fp8 else 0.0  # as data sheets have it
    return specs._replace(source=f"measured on {date}", rates=rates, fp8=fp8)


def _later(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rates that older files of the format have not."""
    given = {name: values[name] for name in Rates._field_defaults if name in values}
    found: dict[str, Any] = {name: _rate(name, given[name]) for name in given if name != "by_phase"}
    if "by_phase" in given:
        forward, backward, again, optimizer = (_rate("by_phase", one) for one in given["by_phase"])
        found["by_phase"] = forward, backward, again, optimizer
    return found


def _moving(values: Mapping[str, Any]) -> Moving:
    """The shares of a file; those that have a default may be missing, or null."""
    lacks = [name for name in Moving._field_defaults if values.get(name) is None]
    given = [name for name in Moving._fields if name not in lacks]
    return Moving(**{name: _rate(name, values[name]) for name in given})


def _product(values: Mapping[str, Any]) -> Product:
    return Product(**{name: _rate(name, values[name]) for name in Product._fields})


def _rate(name: str, value: object) -> float:
    least, most = BOUNDS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{name}={shown(value)} must be a number")
    if not least <= value <= most:
        raise ValueError(f"{name}={shown(value)} is not between {least:g} and {most:g}")
    return float(value)


def as_json(
    gpu: GPU, specs: GpuSpecs, device: str, made: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """What the file holds.

    gpu, specs  as plans name it, with `specs.rates`
    device      the driver's name
    made        when and with what it was measured
    more        what was measured, for those who look at the file
    """
    assert specs.rates is not None
    rates = specs.rates._asdict()
    for name in ("moving", *PRODUCTS):
        rates[name] = rates[name] and rates[name]._asdict()
    return {
        "format": FORMAT,
        "gpu": {
            "name": gpu.name,
            "device": device,
            "memory": gpu.memory,
            "capability": list(gpu.capability),
        },
        "made": dict(made),
        "specs": {name: getattr(specs, name) for name in FIGURES} | {"like": specs.like},
        "rates": rates,
        **more,
    }
