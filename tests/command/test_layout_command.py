"""`tight-fit --layout`: its answers, and what it refuses."""

import json

import pytest

from tight_fit.command.main import main

SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


STEP = ["--gpu", "A100-40GB", "--batch", "8", "--length", "64"]


def test_an_answer_in_text(model, capsys):
    assert main([model, *STEP, "--layout", "hsdp=2x2", "--machines", "2"]) == 0
    said = capsys.readouterr().out
    assert "fp32 shards, gathered and computed in bf16" in said
    assert "hsdp=2x2 on 2 machines of 2 × A100-40GB, NVLink 3" in said
    assert "YES, it fits: each GPU needs" in said and "replicate, all_reduce" in said
    assert "tokens per second" in said


def test_an_answer_as_json(model, capsys):
    main([model, *STEP, "--layout", "fsdp=4", "--recompute", "selective", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["recompute"] == "selective" and facts["micro_batch"] == 2
    assert sum(facts["at_peak"].values()) == facts["peak"]
    assert facts["need"] == sum(facts["terms"].values())
    assert facts["sent"]["data"].keys() == {"all_gather", "reduce_scatter", "all_reduce"}
    assert facts["tokens_per_second"] == pytest.approx(8 * 64 / facts["seconds"])


def test_weights_in_4_bits_are_divided_by_fsdp2_in_numbers_of_16_bits(model, capsys):
    sent = {}
    for base in ("bf16", "nf4"):
        step = [model, *STEP, "--base", base, "--lora", "4", "--layout", "fsdp=2"]
        main([*step, "--json"])
        sent[base] = json.loads(capsys.readouterr().out)["sent"]["data"]["all_gather"]
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160  # weights; the last of two is gathered once
    assert sent["bf16"] - sent["nf4"] == 3 * layer * (2 - 0.5) / 2
    main(step)
    assert "only if bnb_4bit_quant_storage is bf16" in capsys.readouterr().out


def test_a_gpu_by_its_size_has_no_seconds(model, capsys):
    main([model, "--gpu", "24GB", "--batch", "4", "--length", "16", "--layout", "ddp=2"])
    said = capsys.readouterr().out
    assert "The time of a step is not planned" in said and "bf16 autocast" in said


def test_a_gpu_without_bf16_computes_in_fp16(model, capsys):
    assert main([model, "--gpu", "T4", "--batch", "4", "--length", "16", "--layout", "ddp=2"]) == 0
    said = capsys.readouterr().out
    assert "fp32 weights, fp16 autocast with loss scaling" in said and "A step takes" in said
