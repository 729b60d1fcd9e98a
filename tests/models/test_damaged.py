"""Files that are whole are found whole; what is cut or replaced is not."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tight_fit.models.damaged import POINTER, fault

MINI = Path(__file__).parents[2] / "helpers" / "mini"
REAL = [
    *(MINI / "deberta" / name for name in ("model.safetensors", "config.json")),
    *(MINI / "vit").glob("*.safetensors"),
    *(MINI / "vit").glob("*.json"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{suffix: bytes} of a whole file of each kind."""
    import pyarrow
    import pyarrow.parquet
    import sentencepiece

    folder = tmp_path_factory.mktemp("whole")
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, folder / "x.safetensors")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2]}), folder / "x.parquet")
    (folder / "x.json").write_text('{"a": 1}')
    (folder / "x.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the oil price", "the new gold", "grain and oil"] * 4),
        model_prefix=str(folder / "x"),
        vocab_size=24,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    kinds = (".safetensors", ".parquet", ".json", ".jsonl", ".model")
    return {kind: (folder / f"x{kind}").read_bytes() for kind in kinds}


@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_bundled_files_are_whole(path):
    assert fault(path) is None


KINDS = (".safetensors", ".parquet", ".json", ".jsonl", ".model")


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_whole(kind, whole, tmp_path):
    (tmp_path / f"x{kind}").write_bytes(whole[kind])
    assert fault(tmp_path / f"x{kind}") is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["empty", "pointer", "cut", "random", "text"])
def test_a_damaged_file_is_found(kind, how, whole, tmp_path):
    path, data = tmp_path / f"x{kind}", whole[kind]
    content = {
        "empty": b"",
        "pointer": POINTER + b"v1\noid sha256:0\nsize 3\n",
        "cut": data[: len(data) - 3],
        "random": b"\xfe" + random.Random(0).randbytes(500),
        "text": b"<html>404</html>",
    }[how]
    path.write_bytes(content)
    said = fault(path)
    assert said and ("git lfs pull" in said) == (how == "pointer")


def test_other_files_are_only_not_empty_and_there(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"anything")
    assert fault(tmp_path / "x.bin") is None
    assert "cannot be read" in fault(tmp_path / "gone.bin")


def test_a_nested_header_is_no_crash(tmp_path):
    for text in ("[" * 10**5, json.dumps({"a": 1}), json.dumps([1]), '{"a": {"data_offsets": 3}}'):
        data = text.encode()
        (tmp_path / "x.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
        assert "header" in fault(tmp_path / "x.safetensors")
