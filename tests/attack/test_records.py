"""Records: figures that cannot be, missing or foreign fields, files of other runs, escapes."""

import json
import math
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from benchmarks import markdown
from helpers import record, tables
from tests.attack import refused
from tests.small import a_run
from tools.course import blocks, records, trust

RUN = a_run("98_bad/before")
FILE = "98_bad.before.json"
TEXT = RUN.to_json()
LATER = (datetime.now(UTC) + timedelta(days=3)).isoformat(timespec="seconds")
NO_NUMBERS = (None, "1", [1], {"a": 1}, True, math.nan, math.inf)
NO_BYTES = (0, -1, 1.5, 10**400, *NO_NUMBERS)
NO_SECONDS = (-0.1, math.nan, math.inf)
NO_TEXTS = (None, 3, ["a"])


def inner_of(values, path):
    """What holds the last key of a path."""
    for key in path[:-1]:
        values = values[key]
    return values


def with_field(*path, value):
    """The text of the record with another value at this place."""
    values = json.loads(TEXT)
    inner_of(values, path)[path[-1]] = value
    return json.dumps(values)


def without(*path):
    values = json.loads(TEXT)
    del inner_of(values, path)[path[-1]]
    return json.dumps(values)


FIELDS = {
    "name": ("98_bad", "/", "../x/y", "98_bad/be fore", "98_bad/<b>", "", "98_bad/before/again",
             "98_bad\\before", "98_bad/b\u00e9fore\n", *NO_TEXTS),
    "losses": ([], [1.0], [1.0, 2.0, 3.0], None, "1.0", {"0": 1.0}),
    ("losses", 1): (10**400, -math.inf, *NO_NUMBERS),
    "seconds": ([], [0.1], None, 0.1),
    ("seconds", 0): (-0.1, 0.0, 1e308, *NO_NUMBERS),
    "rows": ([], [16], None),
    ("rows", 0): (17, 10**9, *NO_BYTES),
    "skipped": ([2], [-1], [0, 0], [1, 0], [0.5], ["0"], [None], None, 0),
    "accuracy": (-0.01, 1.01, 93.0, *NO_NUMBERS),
    "test_rows": NO_BYTES,
    "train_rows": NO_BYTES,
    "date": ("9999-01-01T00:00:00+00:00", "yesterday", "", "2026-13-01T00:00:00+00:00",
             "2026-01-01T00:00:00", LATER, "1970-01-01T00:00:00+00:00", "2026-01-01T00:00:00+14:00",
             "2026-01-01", "2026-02-30T00:00:00+00:00", "2026-01-01T25:00:00+00:00", *NO_TEXTS),
    "command": NO_TEXTS,
    "version": (0, 2, "1", None, 1.5, True, 10**400),
    "environment": (None, [], "cpu", {}),
    ("environment", "device"): ("cuda", *NO_TEXTS),  # without the figures of a GPU
    ("environment", "name"): ("", " ", *NO_TEXTS),
    ("environment", "torch"): (["2.13"], {"a": 1}, 1.5),
    "plan": (None, [], {}, "cpu"),
    ("plan", "target"): ("gpu", *NO_TEXTS),
    ("plan", "peak"): NO_BYTES,
    ("plan", "allocated"): (0, -1, 1.5, None),
    ("plan", "at_peak"): (None, [1], {"weights": -1}, {"weights": "1"}),
    ("plan", "flops"): (None, 3, {"forward": -1}, {"forward": 1.5}),
    ("plan", "seconds"): ({"forward": -0.1}, [1.0], True, *NO_SECONDS),
    "memory": (None, [], {}, 3),
    ("memory", "more"): (-1, math.nan, {"a": {"b": -1}}),
    ("memory", "tracked"): NO_BYTES,
    **{("memory", name): (-1, 0, 1.5, "1", True) for name in ("allocated", "reserved", "device")},
    ("memory", "at_peak"): (None, {"weights": -1}, [1]),
    "recipe": (None, [], {"colour": 1}, {"steps": 0}, {"steps": 10**400}, "vit"),
    ("recipe", "seed"): (-1, 2**32, "0"),
    ("recipe", "model"): ("gpt", 3, None),
}  # fmt: skip


def short(value):
    return "_".join(map(str, value)) if isinstance(value, tuple) else f"{value!r:.12}"


@pytest.mark.parametrize(
    "path, value",
    [(path, value) for path, values in FIELDS.items() for value in values],
    ids=short,
)
def test_a_field_that_cannot_be_is_one_sentence_of_the_file(path, value, tmp_path):
    (tmp_path / FILE).write_text(
        with_field(*((path,) if isinstance(path, str) else path), value=value)
    )
    said = refused(ValueError, FILE, lambda: records.read_file(tmp_path / FILE))
    assert len(said) < 400


LEFT_OUT = [(name,) for name in json.loads(TEXT)]
LEFT_OUT += [("plan", "peak"), ("plan", "target"), ("plan", "at_peak"), ("memory", "tracked")]
LEFT_OUT += [("memory", "allocated"), ("environment", "device"), ("environment", "name")]


@pytest.mark.parametrize("path", LEFT_OUT, ids=short)
def test_a_missing_field_is_one_sentence_of_the_file(path, tmp_path):
    (tmp_path / FILE).write_text(without(*path))
    refused(ValueError, [FILE, path[-1]], lambda: records.read_file(tmp_path / FILE))


FILES = {
    "empty": b"",
    "null": b"null",
    "a list": b"[1, 2]",
    "broken off": TEXT.encode()[:300],
    "twice": TEXT.encode() * 2,
    "UTF-16": TEXT.encode("utf-16"),
    "Latin-1": TEXT.replace("a test", "ä").encode("latin-1"),
    "a mark before it": b"\xef\xbb\xbf" + TEXT.encode(),
    "zeros": bytes(1000),
    "a name twice": TEXT.replace('"accuracy"', '"accuracy": 0.9, "accuracy"').encode(),
    "deep": b"[" * 100_000,
    "a deep field": TEXT.replace(
        '"peak"', '"more": ' + '{"a": ' * 400 + "1" + "}" * 400 + ', "peak"', 1
    ).encode(),
    "a long number": b'{"version": ' + b"1" * 5000 + b"}",
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\n",
    "another field": with_field("colour", value="red").encode(),
    "many fields": json.dumps(json.loads(TEXT) | {f"field{n}": 1 for n in range(5000)}).encode(),
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_that_is_no_record_is_one_sentence_of_the_file(content, tmp_path):
    (tmp_path / FILE).write_bytes(content)
    refused(ValueError, FILE, lambda: records.read_file(tmp_path / FILE))


def test_a_folder_or_a_pipe_in_the_place_of_a_record_is_one_sentence(tmp_path):
    """A pipe is not waited for."""
    (tmp_path / FILE).mkdir()
    refused(ValueError, FILE, lambda: records.read_file(tmp_path / FILE))
    os.mkfifo(tmp_path / "02.run.json")
    refused(ValueError, "ordinary file", lambda: records.read_file(tmp_path / "02.run.json"))


@pytest.mark.parametrize("name", ["97_x.before.json", "98_bad.after.json", "98_bad.json", "a.json"])
def test_a_file_named_for_another_run_is_one_sentence(name, tmp_path):
    (tmp_path / name).write_text(TEXT)
    refused(ValueError, [name, "98_bad/before"], lambda: records.read_file(tmp_path / name))


@pytest.mark.parametrize(
    "field, value", [("losses", [1.0, math.nan]), ("accuracy", math.inf), ("name", "no name")]
)
def test_what_makes_no_record_is_not_written(field, value, tmp_path):
    with pytest.raises(ValueError):
        record.write(replace(RUN, **{field: value}), tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- pages


NASTY = "<script>alert('x')</script> | T4\n\n# A heading <img src=x>"


def on_gpu(name):
    values = json.loads(TEXT)
    values["environment"] = {"device": "cuda", "name": name, "driver": name, "torch": name}
    values["memory"] |= {"allocated": 2**20, "reserved": 2**21, "device": 2**22}
    values["plan"] |= {"target": "cuda", "allocated": 2**20, "reserved": 2**21}
    return json.dumps(values)


@pytest.mark.parametrize("name", ["Tesla T4", NASTY])
def test_no_tag_of_a_record_is_shown_and_a_bad_file_costs_one_line(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    (tmp_path / FILE).write_text(on_gpu(name))
    page = tables.runs(record.read("98_bad"))
    assert page.frame["run"].tolist() == ["before"]
    recorded = markdown.of(tables.Table([{"recorded": blocks.recorded("98_bad")}]))
    (tmp_path / "98_bad.after.json").write_text("{")
    text = trust.of_records() + recorded
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("Left out: 98_bad.after.json is no record")
    assert "\n# A heading" not in text
    for shown in (page._repr_html_(), text):
        assert "<script" not in shown and "<img" not in shown
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and all(line.replace("\\|", "").endswith(" |") for line in rows)


@pytest.mark.parametrize(
    "memory",
    [
        {"allocated": 40 * 2**30, "reserved": 41 * 2**30},
        {"allocated": 2**30, "reserved": 17 * 2**30},
        {"allocated": 2**30 + 1, "reserved": 2**30},
    ],
)
def test_memory_that_a_gpu_cannot_have_held_makes_no_record(memory):
    """More than a T4 has, and more in use than was reserved."""
    values = json.loads(on_gpu("Tesla T4"))
    assert records.of_text(json.dumps(values))
    values["memory"] |= memory
    refused(ValueError, "memory[", lambda: records.of_text(json.dumps(values)))
