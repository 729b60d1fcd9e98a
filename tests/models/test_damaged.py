"""Files that are whole are found whole; what is cut or replaced is not."""

import json
from pathlib import Path

import pytest

from tight_fit.models.damaged import fault

MINI = Path(__file__).parents[2] / "helpers" / "mini"
REAL = [
    *(MINI / "deberta" / name for name in ("model.safetensors", "config.json")),
    *(MINI / "vit").glob("*.safetensors"),
    *(MINI / "vit").glob("*.json"),
]


@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_bundled_files_are_whole(path):
    assert fault(path) is None


def test_other_files_are_only_not_empty_and_there(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"anything")
    assert fault(tmp_path / "x.bin") is None
    assert "cannot be read" in fault(tmp_path / "gone.bin")


def test_a_nested_header_is_no_crash(tmp_path):
    for text in ("[" * 10**5, json.dumps({"a": 1}), json.dumps([1]), '{"a": {"data_offsets": 3}}'):
        data = text.encode()
        (tmp_path / "x.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
        assert "header" in fault(tmp_path / "x.safetensors")
