"""`tight-fit --layout`: its answers."""

import pytest

STEP = "--gpu A100-40GB --batch 8 --length 64"


def test_an_answer_in_text(ask):
    status, said = ask(f"{STEP} --layout hsdp=2x2 --machines 2")
    assert status == 0 and "fp32 shards, gathered and computed in bf16" in said
    assert "hsdp=2x2 on 2 machines of 2 × A100-40GB, NVLink 3" in said
    assert "YES, it fits: each GPU needs" in said and "replicate, all_reduce" in said
    assert "tokens per second" in said


def test_an_answer_as_json(facts):
    found = facts(f"{STEP} --layout fsdp=4 --recompute selective")
    assert found["recompute"] == "selective" and found["micro_batch"] == 2
    assert sum(found["at_peak"].values()) == found["peak"]
    assert found["need"] == sum(found["terms"].values())
    assert found["sent"]["data"].keys() == {"all_gather", "reduce_scatter", "all_reduce"}
    assert found["tokens_per_second"] == pytest.approx(8 * 64 / found["seconds"])


def test_weights_in_4_bits_are_divided_by_fsdp2_in_numbers_of_16_bits(facts, ask):
    step = f"{STEP} --lora 4 --layout fsdp=2 --base"
    bf16, nf4 = (facts(f"{step} {base}")["sent"]["data"]["all_gather"] for base in ("bf16", "nf4"))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128  # weights; the last of two is gathered once
    assert bf16 - nf4 == 3 * layer * (2 - 0.5) / 2
    assert "only if bnb_4bit_quant_storage is bf16" in ask(f"{step} nf4")[1]


def test_a_gpu_by_its_size_has_no_seconds_and_one_without_bf16_computes_in_fp16(ask):
    said = ask("--gpu 24GB --batch 4 --length 16 --layout ddp=2")[1]
    assert "The time of a step is not planned" in said and "bf16 autocast" in said
    status, said = ask("--gpu T4 --batch 4 --length 16 --layout ddp=2")
    assert status == 0 and "fp32 weights, fp16 autocast with loss scaling" in said
    assert "A step takes" in said
