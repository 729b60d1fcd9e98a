"""Processes that rehearse side by side in one checkout share the files in build/pretended."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

from helpers.recipe import Recipe
from tools.pretend import build, mirror, narrow, true_size


def test_processes_side_by_side_take_one_mirror(tmp_path, monkeypatch):
    """A second one made at the same time took the first from those who were reading it."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(mirror, "FOLDER", tmp_path / "mirror")
    both, made = threading.Barrier(2), []

    def make(place):
        made.append(place)
        with suppress(threading.BrokenBarrierError):
            both.wait(1)  # for the other one, who makes a mirror too unless it waits
        place.mkdir(exist_ok=True)

    monkeypatch.setattr(mirror, "make", make)
    with ThreadPoolExecutor(2) as pool:  # each opens the lock for itself, as a process does
        found = list(pool.map(lambda _: mirror.folder(), range(2)))
    assert len(made) == 1 and set(found) == {tmp_path / "mirror"}
    assert (tmp_path / "mirror" / "version").read_text() == mirror.VERSION


def test_needs_are_written_by_one_process_at_a_time(tmp_path, monkeypatch):
    """Of two that replaced one file at the same time, one found it gone and ended its step."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(true_size, "FOLDER", tmp_path / "needs")
    planned = SimpleNamespace(peak=3, overhead=4)
    monkeypatch.setattr(narrow, "outside", lambda plan: lambda *given: planned)
    write, both, together = true_size.replace_all, threading.Barrier(2), []

    def replace_all(folder, texts):
        with suppress(threading.BrokenBarrierError):
            both.wait(1)
            together.append(texts)
        write(folder, texts)

    monkeypatch.setattr(true_size, "replace_all", replace_all)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(true_size.need.__wrapped__, [Recipe()] * 2))
    assert found == [(3, 4)] * 2 and not together
