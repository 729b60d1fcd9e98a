"""Sets of releases: what each installs, how its tests are counted, and the page's table."""

import json
import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tight_fit.command import wrapper
from tools import versions

REQUIREMENTS = (versions.ROOT / "requirements.txt").read_text(encoding="utf8")
REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest">
<testcase classname="tests.core.test_lora" name="test_a"/>
<testcase classname="tests.core.test_lora" name="test_b"><failure message="no"/></testcase>
<testcase classname="tests.core.test_lora" name="test_c"><error message="no"/></testcase>
<testcase classname="tests.core.test_lora" name="test_d"><skipped message="no"/></testcase>
<testcase classname="build.first.07_lora.ipynb" name="Cell 0"/>
</testsuite></testsuites>"""
COLAB = (
    "numpy==2.1.3\nnvidia-nccl-cu12==2.28.9\ntorch==2.11.0+cu128\ngoogle-colab @ file:///c.tar\n"
)


def test_the_lowest_set_pins_every_line_at_its_floor():
    pinned = {Requirement(line).name: Requirement(line) for line in versions.floors(REQUIREMENTS)}
    lines = [Requirement(line) for line in REQUIREMENTS.splitlines() if line and line[0] != "#"]
    assert {line.name for line in lines} == set(pinned)
    for line in lines:
        (release,) = (Version(one.version) for one in pinned[line.name].specifier)
        least = min(Version(one.version) for one in line.specifier if one.operator == ">=")
        assert release == least and release in line.specifier
    for line in ("torch", "torch<3", "torch==2.11"):
        with pytest.raises(ValueError, match="names no lowest release"):
            versions.floors(f"# comment\n{line}\n")


def test_colabs_list_is_read_without_builds_and_files():
    assert versions.pins(COLAB) == {"numpy": "2.1.3", "torch": "2.11.0"}
    with pytest.raises(ValueError, match="pins no torch"):
        versions.pins("numpy==2.1.3\n")


def test_what_failed_is_named_and_the_rest_counted():
    found = versions.counted(REPORT)
    failed = ["tests.core.test_lora::test_b", "tests.core.test_lora::test_c"]
    assert found == {"passed": 2, "skipped": 1, "failed": failed}
    kept = {"lowest": {"date": "2026-01-01", "releases": {}, "install": "ERROR: no torch"}}
    kept["newest"] = {"date": "2026-01-01", "releases": {}, "fast tests": found}
    table = versions.table(kept)
    assert "could not be installed" in table and "- lowest: ERROR: no torch" in table
    assert "| 2 passed, 2 failed, 1 skipped |" in table and f"- newest: `{failed[0]}`" in table


def test_copies_hold_setup_and_imports_of_every_lesson(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    (tmp_path / "notebooks").symlink_to(versions.PAGE.parents[1] / "notebooks")
    paths = versions.copies("first", code_cells=2)
    assert len(paths) == len(list((tmp_path / "notebooks").glob("*.ipynb"))) > 20
    for path in paths:
        cells = json.loads((tmp_path / path).read_text(encoding="utf8"))["cells"]
        setup, imports = ("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        assert "helpers.setup" in setup and re.search(r"^(from|import) ", imports, re.M), path
        assert not any("tags" in cell["metadata"] for cell in cells)


def test_what_is_tested_exists_and_the_page_shows_what_is_kept():
    assert all((versions.ROOT / "tests" / part).exists() for part in versions.TESTS)
    dev = (versions.ROOT / "requirements-dev.txt").read_text(encoding="utf8")
    assert set(versions.TESTING) <= set(re.findall(r"^[\w-]+", dev, re.M))
    text, kept = versions.PAGE.read_text(encoding="utf8"), versions.read()
    assert set(kept) <= set(versions.SETS) and kept
    assert versions.table(kept) in text


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["colab"], "needs Colab's list"),
        (["colab", "--colab", str(versions.ROOT / "requirements.txt")], "pins no torch"),
        (["colab", "--colab", "nowhere.txt"], "nowhere.txt"),
        (["oldest"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(versions, "tried", None)
    try:
        status = wrapper.run(lambda: versions.main(arguments), "python -m tools.versions")
    except SystemExit as ended:
        status = ended.code
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and says in said
