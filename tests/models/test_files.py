"""Files that are fetched: waited for as long as they grow, and known to be whole."""

import json
import time

import pytest

from tests.small import ROOT
from tight_fit.models import hub
from tight_fit.models.damaged import fault

MINI = ROOT / "helpers" / "mini"


def test_a_download_is_waited_for_as_long_as_it_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.02)

    def grows():
        for part in range(8):
            time.sleep(0.1)
            with (tmp_path / "blob").open("ab") as file:
                file.write(b"x" * part)
        return "whole"

    assert hub.while_it_grows(grows, tmp_path, 0.6) == "whole"
    with pytest.raises(hub.StoodStill, match="nothing came for 0.1 seconds"):
        hub.while_it_grows(lambda: time.sleep(30), tmp_path, 0.1)
    with pytest.raises(KeyError):  # an error of the download itself
        hub.while_it_grows(lambda: {}["x"], tmp_path, 1.0)


def test_files_that_are_whole_are_found_whole(tmp_path):
    """What is cut or replaced is in tests/attack/test_hub.py."""
    whole = [MINI / "deberta" / "config.json", *MINI.glob("*/*.safetensors"), tmp_path / "x.bin"]
    whole[-1].write_bytes(b"anything")
    faults = {str(path): fault(path) for path in whole}
    assert len(faults) > 3 and set(faults.values()) == {None}, faults
    assert "cannot be read" in fault(tmp_path / "gone.bin")
    for text in ("[" * 10**5, json.dumps({"a": 1}), json.dumps([1]), '{"a": {"data_offsets": 3}}'):
        data = text.encode()
        (tmp_path / "x.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
        assert "header" in fault(tmp_path / "x.safetensors")
