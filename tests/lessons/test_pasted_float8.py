"""Lesson 27's own code, planned as the program that it is, beside the planner's products in FP8."""

import json

import pytest
from transformers import Qwen3Config

from tests.lessons.cells import own_code
from tests.script import run
from tight_fit.plans.model import plan_model

CONFIG = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def test_the_lines_of_lesson_27_take_what_is_planned(tmp_path):
    """On a GPU with FP8, where nothing emulates it."""
    pytest.importorskip("torchao", minversion="0.16")
    text = own_code(
        "27",
        ("import Float8LinearConfig, convert", "convert_to_float8_training(model, config=scaling"),
        (
            'AutoModelForCausalLM.from_pretrained(MINI / "decoder", dtype=torch.bfloat16)',
            "Qwen3ForCausalLM(Qwen3Config(**FULL)).to('cuda', torch.bfloat16)",
        ),
        (", emulate=True)", ")"),
        ("(4, 32))", "(4, 128), device='cuda')"),
        ("lr=1e-3)", "lr=1e-3, fused=True)"),
    )
    head = "import json\nimport logging\nimport torch\n"
    head += "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
    head += f"FULL = json.loads({json.dumps(CONFIG)!r})\n"
    path = tmp_path / "train.py"
    path.write_text(head + text, encoding="utf8")
    facts = run(str(path), gpu="H100", seconds=300)
    step = {"batch_size": 4, "length": 128, "weights": "bf16", "optimizer": "adamw"}
    step |= {"float8": "rowwise", "max_grad_norm": None}
    planned = plan_model(Qwen3Config(**CONFIG), **step)
    assert facts["peak"] == pytest.approx(planned.peak, rel=0.01)
