"""Lesson 14: what its `shard` of a language model sends and keeps, on two ranks. It and lesson 16:
what transformers loads in shards and in cuts by itself."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.forked import forked, results
from tests.lessons.cells import markdown_of, the_cell
from tests.small import ROOT


@pytest.fixture(scope="module")
def told():
    cells = [the_cell("14", words) for words in ("def shard(", "set_requires_gradient_sync(")]
    return results(forked("tests/ranks/sharded.py", *cells, ranks=2))[0]


@pytest.mark.parametrize("tied", [True, False])
def test_it_gathers_in_bf16_and_adds_up_in_fp32(told, tied):
    """Bytes per parameter, in a ring: gathers of 2 bytes and gradients of 4; DDP sends 8.

    Stage 3 gathers twice, but what the backward pass needs first (`once`: the last layer,
    embeddings and head) as stage 2 does.
    """
    again = 1 - told[f"{tied} 3"]["once"]
    for stage, gathers in ((2, 1), (3, 1 + again)):
        assert told[f"{tied} {stage}"]["sent"] == pytest.approx(gathers * 2 + 4, rel=1e-3)
        assert told[f"{tied} {stage}"]["kept"] == ["torch.float32"]  # shards and gradients


def test_its_loop_accumulates_and_clips_as_on_one_rank(told):
    assert told["loop"]["norm"] > 0.5  # it is clipped, at 0.1
    assert told["loop"]["apart"] < 1e-5


def test_tied_embeddings_cannot_be_a_group_of_their_own(told):
    assert "shared with a parameter already managed by another FSDP group" in told["alone"]


def test_a_checkpoint_in_bf16_stays_so_unless_fp32_is_asked_for(tmp_path):
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).bfloat16().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained
    assert loaded(tmp_path).dtype == torch.bfloat16
    assert loaded(tmp_path, dtype=torch.float32).dtype == torch.float32
    assert "dtype=torch.float32" in the_cell("14", "shard(model, mesh=")


def test_the_script_does_not_move_the_whole_model_to_the_gpu():
    text = (ROOT / "scripts" / "fsdp.py").read_text()
    made = text.index("from_pretrained(")
    assert ".to(device)" not in text[made : text.index("fully_shard(model")]


def test_transformers_loads_shards_and_cuts_as_the_lessons_say(tmp_path):
    """The same weights, a part of them on each rank; gradients of the cuts are right, and torch's
    clipping refuses them."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(tmp_path)
    assert "DistributedConfig(fsdp_size=4, fsdp_mixed_precision=True)" in markdown_of("14")
    assert 'DistributedConfig(tp_plan="auto")' in markdown_of("16")
    for told in results(forked("tests/ranks/loaded_in_shards.py", tmp_path, ranks=2)):
        sharded, cut = told["sharded"], told["cut"]
        assert sharded["same"] and sharded["held"] == pytest.approx(0.5, abs=0.01)
        assert sharded["kinds"] == ["torch.bfloat16", "torch.float32"]
        assert cut["apart"] < 1e-4 and cut["held"] < 0.6
        assert "mixed torch.Tensor and DTensor" in cut["error"]
