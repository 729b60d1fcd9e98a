"""Every test, and every notebook that nbval runs, sees the mini profile and no progress bars."""

import gc
import os
from math import inf

import pytest

from tests import durations

os.environ["TIGHT_FIT_PROFILE"] = "mini"
os.environ["TQDM_DISABLE"] = "1"
os.environ["TIGHT_FIT_CALIBRATION"] = "none"  # plans by the table, whatever was measured here
for name in ("TIGHT_FIT_RUNS", "TIGHT_FIT_COMMAND", "TIGHT_FIT_MIRROR", "TIGHT_FIT_GRADE"):
    os.environ.pop(name, None)
os.environ.pop("PYTEST_ADDOPTS", None)  # heeded by now; a pytest that a test starts has its own


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marker
def pytest_collection_modifyitems(config, items):
    """Mark the tests that took longest when all were timed (tests/slow.tsv), but to time them.

    Where processes share the tests, the longest files begin first, or one would be left at the end:
    notebooks that were not timed, then by seconds.
    """
    slow, night, files = durations.read()
    if not config.pluginmanager.has_plugin("tests.durations"):  # which `-p` has registered
        for item in items:
            if item.nodeid in slow:
                item.add_marker(pytest.mark.slow)
            if item.nodeid in night:
                item.add_marker(pytest.mark.night)
    if hasattr(config, "workerinput"):
        for item in items:
            files.setdefault(
                durations.file_of(item.nodeid), inf if ".ipynb" in item.nodeid else 0.0
            )
        items.sort(key=lambda item: -files[durations.file_of(item.nodeid)])


@pytest.fixture(scope="session", autouse=True)
def settled():
    """Garbage collections leave out what is imported: measuring memory makes many of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty notebooks/ folder, for the tests of the tooling."""
    from tools.course import pages

    (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr(pages, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "notebooks"


@pytest.fixture(autouse=True)
def same_environment():
    """No test leaves the course's variables changed for those that follow."""
    before = {name: value for name, value in os.environ.items() if name.startswith("TIGHT_FIT")}
    yield
    after = {name: value for name, value in os.environ.items() if name.startswith("TIGHT_FIT")}
    os.environ.update(before)
    assert after == before
