"""Lesson 24's program cannot be planned as a program, and the lesson says so."""

import json

import pytest
from transformers import LlamaConfig

from tests.lessons.cells import markdown_of, own_code
from tests.script import run
from tight_fit.layouts.torch_private_ranks import put_ring_under_attention
from tight_fit.script.program import Refused
from tight_fit.script.ranks import ProgramRank

CONFIG = LlamaConfig(
    vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


def test_the_prototype_of_context_parallelism_is_refused_as_the_lesson_says(tmp_path):
    """Also where layouts with context ranks were planned in this process. Where the program is
    planned one day: compare its activations with those of `context=2`."""
    put_ring_under_attention()
    assert "`tight-fit script` refuses the prototype" in markdown_of("24")
    told = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(told), encoding="utf8")
    text = own_code("24", ("set_rotate_method(", "def in_chunks(", "def split_step(", "def train("))
    text += f"\ntrain({str(tmp_path)!r}, [torch.ones(1, 256, dtype=torch.int64)] * 3)\n"
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{text}", encoding="utf8")
    with pytest.raises(Refused, match="attention.* does not have a sharding strategy"):
        run(str(path), gpu="A100-80GB", seconds=300, rank=ProgramRank(1, 2))
