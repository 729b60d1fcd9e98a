"""A small decoder that the command is asked about."""

import pytest
import transformers as library


@pytest.fixture
def folder(tmp_path):
    library.LlamaConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=128, max_position_embeddings=128,
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path
