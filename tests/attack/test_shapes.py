"""Unusual values: sets for lists, arrays that are shared, GPUs and configurations that cannot be.

And a fine-tune by a script whose end would be lost.
"""

import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, GPT2Config, Qwen3Config

from by_hand import packing
from helpers import batching
from helpers.plan import plan
from helpers.recipe import Recipe
from tests.attack import one_sentence, refused
from tight_fit.command import main as command
from tight_fit.gpus import GPU, as_gpu
from tight_fit.models.bounds import check_sizes
from tight_fit.models.step import ModelStep

ROOT = Path(__file__).resolve().parents[2]
DECODER = ROOT / "helpers" / "mini" / "decoder"
WRONG = (ValueError, TypeError)

# -- lengths: what has no order, or is no list

NO_LISTS = {
    "a set": {3, 4, 5},
    "a frozen set": frozenset((3, 4)),
    "keys": {3: 1, 4: 1}.keys(),
    "values": {3: 1, 4: 1}.values(),
    "bytes that change": bytearray(b"345"),
    "an iterator": iter([3, 4]),
    "a generator": (length for length in (3, 4)),
    "a map": map(int, "34"),
    "an array without dimensions": np.array(3),
    "a tensor without dimensions": torch.tensor(3),
    "truths of NumPy": np.array([True, True]),
    "a matrix": np.ones((2, 2), int),
    "fractions in an array": np.array([3.5, 4.0]),
    "the least number": np.array([-(2**63)]),
    "no numbers": torch.tensor([]),
}


@pytest.mark.parametrize(
    "call",
    [
        lambda lengths: batching.length_sorted(lengths, 2),
        lambda lengths: batching.bucketed(lengths, 2, 1, 4, 0, 0),
        lambda lengths: packing.pack(lengths, 8),
    ],
    ids=["length_sorted", "bucketed", "pack"],
)
@pytest.mark.parametrize("name", NO_LISTS)
def test_lengths_are_in_a_list(call, name):
    refused(WRONG, [], lambda: call(NO_LISTS[name]))


# -- what a plan shows may be changed, and the next plan is not

SMALL = Recipe("vit", batch_size=4)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.flops.clear(),
        lambda made: made.flops.update(forward=0),
        lambda made: made.largest_tensors.clear(),
        lambda made: made.largest_tensors.append((1, "x", "y")),
        lambda made: made.at_peak.clear(),
        lambda made: made.timeline.fill(0),
        lambda made: made.phases.fill(0),
        lambda made: made.timeline.sort(axis=0),
    ],
)
def test_a_plan_that_is_changed_changes_no_other(change):
    before = plan(SMALL)
    kept = dict(before.flops), list(before.largest_tensors), dict(before.at_peak), before.peak
    try:
        change(plan(SMALL))
    except ValueError as error:
        assert "read-only" in str(error)
    after = plan(SMALL)
    assert kept == (after.flops, after.largest_tensors, after.at_peak, after.peak)


# -- GPUs of one's own

GPUS = {
    **{f"called {name!r}": GPU(name, 2**33, (8, 6)) for name in (None, 3, "", " ", "a\nb", b"T4")},
    **{
        f"able to {pair}": GPU("mine", 2**33, pair)
        for pair in ((-8, 6), (8, -6), (99, 0), (8, 10), (10**30, 0), (8, 6, 1), (), (True, False))
    },
}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_gpu_that_cannot_be(gpu):
    refused(WRONG, [], lambda: as_gpu(gpu))
    refused(WRONG, [], lambda: plan(SMALL).fits(gpu))


# -- configurations

LLM = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 99, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
TINY = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 64}


def changed(config, **values):
    for name, value in values.items():
        object.__setattr__(config, name, value)  # as a file may hold it
    return config


@pytest.mark.parametrize("value", [0, -2, -8, 10**12, 10**400, "64", True], ids=str)
@pytest.mark.parametrize("name", ["max_position_embeddings", "head_dim"])
def test_positions_and_heads_are_those_of_a_model(name, value):
    wrong = changed(Qwen3Config(**LLM), **{name: value})
    refused(ValueError, f"{name} of the configuration", lambda: check_sizes(wrong))


@pytest.mark.parametrize("value", [0, -2, 10**12, "64", True], ids=str)
def test_older_names_of_positions_have_bounds_as_well(value):
    wrong = changed(GPT2Config(**TINY), n_positions=value)
    refused(ValueError, "of the configuration", lambda: check_sizes(wrong))


def test_positions_without_an_end_are_fine():
    check_sizes(changed(BertConfig(), max_position_embeddings=-1))


@pytest.mark.parametrize(
    "dtype", ["float64", "float8_e4m3fn", "int8", 0, 1.5, True, {}, 10**30, "x" * 999], ids=str
)
def test_a_dtype_in_which_no_weights_are_planned(dtype):
    wrong = changed(Qwen3Config(**LLM), dtype=dtype)
    refused(ValueError, "name fp32, bf16 or fp16", lambda: ModelStep(wrong))
    assert ModelStep(wrong, weights="bf16").weights == "bf16"


def asked(arguments, capsys, *parts):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    return one_sentence(said.err.split(" (tight-fit")[0].split(" (python -m")[0], *parts)


GPT2 = {"model_type": "gpt2", **TINY}
FILES = {
    **{
        f"{name}={value!r:.12}": {**GPT2, name: value}
        for name, value in (
            ("model_type", "x" * 2000),
            ("model_type", ["gpt2"]),
            ("model_type", 3),
            ("n_positions", 0),
            ("n_positions", math.nan),
            ("n_positions", {}),
            ("n_embd", 33),
            ("n_embd", "32"),
            ("n_embd", -32),
            ("n_head", 0),
            ("n_head", 3),
            ("n_layer", 1.5),
            ("n_layer", None),
            ("n_layer", {}),
            ("n_layer", 10**30),
            ("vocab_size", math.inf),
            ("vocab_size", []),
            ("activation_function", 3),
            ("activation_function", "x" * 2000),
            ("architectures", "GPT2LMHeadModel"),
            ("torch_dtype", "float128"),
            ("dtype", "float8_e4m3fn"),
            ("id2label", 3),
            ("attn_pdrop", "x"),
        )
    },
    "without a model_type": TINY,
}


@pytest.mark.parametrize("values", FILES.values(), ids=FILES)
def test_a_configuration_of_wrong_values_is_one_sentence(values, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(values))
    asked([str(tmp_path), "--gpu", "T4", "--quick"], capsys)


@pytest.mark.parametrize("name", ["00.ipynb", "model.safetensors", "train.py", "config.txt", "x"])
def test_a_file_that_is_no_configuration_is_not_asked_of_the_hub(
    name, tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    asked([f"mine/{name}", "--gpu", "T4"], capsys, "is a file, and no config.json")


# -- a script whose work would be lost


def script():
    spec = importlib.util.spec_from_file_location("finetune_llm", ROOT / "scripts/finetune_llm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path):
    lines = [{"prompt": "Oil rose.", "answer": "crude"}, {"prompt": "w " * 200, "answer": "acq"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "data.jsonl"


def ends(monkeypatch, capsys, *arguments):
    """What the script says, on one line, where it refuses to train."""
    monkeypatch.setattr(sys, "argv", ["finetune_llm.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        script().main()
    said = capsys.readouterr().err
    text = said.splitlines()[-1] if ended.value.code == 2 else str(ended.value.code)
    return one_sentence(text)


@pytest.mark.parametrize("out", ["data.jsonl/adapter", "data.jsonl", "/proc/adapter"])
def test_a_place_that_cannot_be_written_is_said_before_the_training(out, data, monkeypatch, capsys):
    monkeypatch.chdir(data.parent)
    arguments = ("--model", DECODER, "--data", data, "--out", out)
    assert out in ends(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("model", ["gone", "data.jsonl", "."])
def test_a_model_that_is_none_is_one_sentence(model, data, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(data.parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = ("--model", model, "--data", data, "--out", data.parent / "out")
    assert "cannot be loaded" in ends(monkeypatch, capsys, *arguments)


def test_an_answer_that_is_cut_off_is_said_before_the_training(data, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    arguments = ("--model", DECODER, "--data", data, "--out", data.parent / "out", "--length", 64)
    assert "1 of 2 examples have no answer left" in ends(monkeypatch, capsys, *arguments)
    assert not list((data.parent / "out").iterdir())


def test_an_adapter_of_a_loss_that_is_not_finite_is_not_saved(data, monkeypatch, capsys):
    pytest.importorskip("bitsandbytes")
    module = script()
    monkeypatch.setattr(module, "loss_sum", lambda model, *_: sum(
        value.sum() for value in model.parameters() if value.requires_grad) * math.nan)  # fmt: skip
    monkeypatch.setattr(
        sys, "argv", ["finetune_llm.py", "--model", str(DECODER), "--data", str(data),
                      "--out", str(data.parent / "out"), "--steps", "2"]
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        module.main()
    one_sentence(str(ended.value.code), "step 1 is nan", "--rate")
    assert not list((data.parent / "out").iterdir())
