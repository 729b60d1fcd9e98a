"""Records: figures that cannot be, missing or foreign fields, files of other runs, escapes."""

import json
import math
from datetime import UTC, datetime, timedelta

import pytest

from benchmarks import markdown
from helpers import record, tables
from tests.attack import refused
from tests.small import a_run
from tools.course import blocks, records, trust
from tools.course import record as course_record

RUN = a_run("98_bad/before")
FILE = "98_bad.before.json"
TEXT = RUN.to_json()
LATER = (datetime.now(UTC) + timedelta(days=3)).isoformat(timespec="seconds")
NO_NUMBERS = (None, "1", [1], {"a": 1}, True)


def with_field(*path, value):
    """The text of the record with another value at this place."""
    values = json.loads(TEXT)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(values)


def without(*path):
    values = json.loads(TEXT)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return json.dumps(values)


def fields(name, *values):
    return [((*(name if isinstance(name, tuple) else (name,)),), value) for value in values]


FIELDS = [
    *fields("name", "98_bad", "/", "../x/y", "98_bad/be fore", "98_bad/<b>", "", None, 3, ["a/b"]),
    *fields("name", "98_bad/before/again", "98_bad\\before", "98_bad/b\u00e9fore\n"),
    *fields("losses", [], [1.0], [1.0, 2.0, 3.0], None, "1.0", {"0": 1.0}),
    *(((("losses", 1)), value) for value in (math.nan, math.inf, -math.inf, 10**400, *NO_NUMBERS)),
    *fields("seconds", [], [0.1], None, 0.1),
    *(((("seconds", 0)), value) for value in (-0.1, 0.0, 1e308, math.nan, math.inf, *NO_NUMBERS)),
    *fields("rows", [], [16], None),
    *(((("rows", 0)), value) for value in (0, -16, 17, 10**9, 1.5, math.nan, 10**400, *NO_NUMBERS)),
    *fields("skipped", [2], [-1], [0, 0], [1, 0], [0.5], ["0"], [None], None, 0),
    *fields("accuracy", -0.01, 1.01, 93.0, math.nan, math.inf, *NO_NUMBERS),
    *fields("test_rows", -1, 0, 1.5, math.nan, 10**400, *NO_NUMBERS),
    *fields("train_rows", -1, 0, 1.5, *NO_NUMBERS),
    *fields("date", "9999-01-01", "9999-01-01T00:00:00+00:00", "yesterday", "", None, 20260101),
    *fields("date", "2026-13-01T00:00:00+00:00", "2026-01-01T00:00:00", LATER, "1970-01-01"),
    *fields("date", "1970-01-01T00:00:00+00:00", "2026-01-01T00:00:00+14:00", "2026-01-01"),
    *fields("date", "2026-02-30T00:00:00+00:00", "2026-01-01T25:00:00+00:00"),
    *fields("command", None, 3, ["make"]),
    *fields("version", 0, 2, "1", None, 1.5, True, 10**400),
    *fields("environment", None, [], "cpu", {}),
    *fields(("environment", "device"), None, 3, ["cpu"]),
    *fields(("environment", "name"), None, 3, ["x86"], "", " "),
    *fields(("environment", "torch"), ["2.13"], {"a": 1}, 1.5),
    *fields("plan", None, [], {}, "cpu"),
    *fields(("plan", "target"), None, "gpu", 3),
    *fields(("plan", "peak"), 0, -1, 1.5, math.nan, 10**400, *NO_NUMBERS),
    *fields(("plan", "allocated"), 0, -1, 1.5, None),
    *fields(("plan", "at_peak"), None, [1], {"weights": -1}, {"weights": "1"}),
    *fields(("plan", "flops"), None, 3, {"forward": -1}, {"forward": 1.5}),
    *fields(("plan", "seconds"), -1, math.nan, math.inf, {"forward": -0.1}, [1.0], True),
    *fields(("memory", "more"), -1, math.nan, {"a": {"b": -1}}),
    *fields("memory", None, [], {}, 3),
    *fields(("memory", "tracked"), 0, -1, 1.5, math.nan, 10**400, *NO_NUMBERS),
    *fields(("memory", "allocated"), -1, 0, 1.5, "1", True),
    *fields(("memory", "reserved"), -1, 0, "1"),
    *fields(("memory", "device"), -1, 0, "1"),
    *fields(("memory", "at_peak"), None, {"weights": -1}, [1]),
    *fields(("environment", "device"), "cuda"),  # without the figures of a GPU
    *fields("recipe", None, [], {"colour": 1}, {"steps": 0}, {"steps": 10**400}, "vit"),
    *fields(("recipe", "seed"), -1, 2**32, "0"),
    *fields(("recipe", "model"), "gpt", 3, None),
]


def short(value):
    return "_".join(map(str, value)) if isinstance(value, tuple) else f"{value!r:.12}"[:12]


@pytest.mark.parametrize(
    "path, value",
    [pytest.param(p, v, id=f"{short(p)}-{n}") for n, (p, v) in enumerate(FIELDS)],
)
def test_a_field_that_cannot_be_is_one_sentence_of_the_file(path, value, tmp_path):
    (tmp_path / FILE).write_text(with_field(*path, value=value))
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
    "a number": b"3",
    "broken off": TEXT.encode()[:300],
    "twice": TEXT.encode() * 2,
    "UTF-16": TEXT.encode("utf-16"),
    "Latin-1": TEXT.replace("a test", "ä").encode("latin-1"),
    "a mark before it": b"\xef\xbb\xbf" + TEXT.encode(),
    "zeros": bytes(1000),
    "a name twice": TEXT.replace('"accuracy"', '"accuracy": 0.9, "accuracy"').encode(),
    "deep": b"[" * 100_000,
    "a long number": b'{"version": ' + b"1" * 5000 + b"}",
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\n",
    "HTML": b"<!doctype html><title>404</title>",
    "another field": with_field("colour", value="red").encode(),
    "script as a field": with_field("<script>", value=1).encode(),
    "many fields": json.dumps(json.loads(TEXT) | {f"field{n}": 1 for n in range(5000)}).encode(),
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_that_is_no_record_is_one_sentence_of_the_file(content, tmp_path):
    (tmp_path / FILE).write_bytes(content)
    refused(ValueError, FILE, lambda: records.read_file(tmp_path / FILE))


def test_a_folder_in_the_place_of_a_record_is_one_sentence(tmp_path):
    (tmp_path / FILE).mkdir()
    refused(ValueError, FILE, lambda: records.read_file(tmp_path / FILE))


@pytest.mark.parametrize("name", ["97_x.before.json", "98_bad.after.json", "98_bad.json", "a.json"])
def test_a_file_named_for_another_run_is_one_sentence(name, tmp_path):
    (tmp_path / name).write_text(TEXT)
    refused(ValueError, [name, "98_bad/before"], lambda: records.read_file(tmp_path / name))


@pytest.mark.parametrize(
    "field, value", [("losses", [1.0, math.nan]), ("accuracy", math.inf), ("name", "no name")]
)
def test_what_makes_no_record_is_not_written(field, value, tmp_path):
    from dataclasses import replace

    broken = replace(RUN, **{field: value})
    with pytest.raises(ValueError):
        record.write(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- pages


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


NASTY = "<script>alert('x')</script> | T4\n\n# A heading <img src=x>"


def on_gpu(name):
    values = json.loads(TEXT)
    values["environment"] = {"device": "cuda", "name": name, "driver": name, "torch": name}
    values["memory"] |= {"allocated": 2**20, "reserved": 2**21, "device": 2**22}
    values["plan"] |= {"target": "cuda", "allocated": 2**20, "reserved": 2**21}
    return json.dumps(values)


@pytest.mark.parametrize("name", ["Tesla T4", NASTY])
def test_a_notebook_shows_no_tag_of_a_record(name, results):
    (results / FILE).write_text(on_gpu(name))
    page = tables.runs(record.read("98_bad"))
    assert page.frame["run"].tolist() == ["before"]
    html = page._repr_html_()
    assert "<script" not in html and "<img" not in html


@pytest.mark.parametrize("name", ["Tesla T4", NASTY])
def test_one_bad_file_costs_the_page_of_accuracy_one_line(name, results, capsys):
    (results / FILE).write_text(on_gpu(name))
    recorded = markdown.of(tables.Table([{"recorded": blocks.recorded("98_bad")}]))
    (results / "98_bad.after.json").write_text("{")
    text = trust.of_records() + recorded
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("Left out: 98_bad.after.json is no record")
    assert "<script" not in text and "<img" not in text and "\n# A heading" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and all(line.replace("\\|", "").endswith(" |") for line in rows)


@pytest.mark.parametrize("content", list(FILES.values())[:9], ids=list(FILES)[:9])
def test_a_notebook_that_wrote_no_record_is_one_sentence(content, tmp_path):
    (tmp_path / FILE).write_bytes(content)
    refused(
        course_record.Failed,
        ["98_bad", FILE, "nothing of it was kept"],
        lambda: course_record.checked("98_bad", tmp_path, "mini", None),
    )


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
