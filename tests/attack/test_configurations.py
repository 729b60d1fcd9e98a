"""Configurations: files that are none, wrong values whose fault no library names, huge ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, LlamaConfig, T5Config

from tests.attack import one_sentence, refused
from tests.attack.test_options import KINDS
from tight_fit.models import names
from tight_fit.models.config import read
from tools.course import records

ROOT = Path(__file__).parents[2]


def saved(folder: Path, kind) -> Path:
    (folder / "config.json").write_text(json.dumps(kind(**KINDS[kind]).to_dict()))
    return folder


def test_a_pipe_and_a_device_are_no_configurations_and_no_records(tmp_path):
    """Neither is waited for, nor read to an end that it does not have."""
    os.mkfifo(tmp_path / "config.json")
    refused(ValueError, "ordinary file", lambda: names.values_of(tmp_path))
    os.mkfifo(tmp_path / "02.run.json")
    refused(ValueError, "ordinary file", lambda: records.read_file(tmp_path / "02.run.json"))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    refused(ValueError, "ordinary file", lambda: names.values_of(tmp_path))


def test_a_configuration_of_many_small_lists_is_not_read(tmp_path):
    lists = ",".join(["[]"] * (names.LARGEST // 3 + 1))
    (tmp_path / "config.json").write_text(f'{{"model_type": "bert", "x": [{lists}]}}')
    refused(ValueError, "at most 4,194,304", lambda: names.values_of(tmp_path))


def test_no_field_of_a_configuration_that_works_is_named(tmp_path):
    from tight_fit.models.odd import hint

    for kind in (BertConfig, LlamaConfig, T5Config):
        config = read(saved(tmp_path, kind))
        assert hint(config.model_type, config.to_dict()) == ""


@pytest.mark.parametrize(
    "option, said",
    [("--batch 0", "batch_size=0 must be at least 1"), ("--length 5000", "the 128 tokens")],
)
def test_options_that_cannot_be_are_refused_before_pytorch_is_imported(option, said, tmp_path):
    folder = saved(tmp_path, BertConfig)
    text = (
        "import sys\nfrom tight_fit.command import main\n"
        "status = main.entry()\nassert 'torch' not in sys.modules\nsys.exit(status)"
    )
    command = [sys.executable, "-c", text, str(folder), "--gpu", "T4", *option.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    one_sentence(ended.stderr.partition(" (")[0])
