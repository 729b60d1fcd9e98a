"""A download is waited for as long as it grows."""

import time

import pytest

from tight_fit.models import hub
from tight_fit.models.hub import StoodStill, while_it_grows


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.02)


def test_what_is_fetched_is_given(tmp_path):
    assert while_it_grows(lambda: 7, tmp_path, 1.0) == 7


def test_an_error_of_the_download_is_raised(tmp_path):
    def fetch():
        raise KeyError("x")

    with pytest.raises(KeyError):
        while_it_grows(fetch, tmp_path, 1.0)


def test_silence_ends_the_wait(tmp_path):
    with pytest.raises(StoodStill, match="nothing came for 0.1 seconds"):
        while_it_grows(lambda: time.sleep(30), tmp_path, 0.1)


def test_growth_prolongs_the_wait(tmp_path):
    def fetch():
        for part in range(8):
            time.sleep(0.1)
            with (tmp_path / "blob").open("ab") as file:
                file.write(b"x" * part)
        return "whole"

    assert while_it_grows(fetch, tmp_path, 0.6) == "whole"
