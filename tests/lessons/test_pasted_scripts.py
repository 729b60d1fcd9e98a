"""Scripts that lessons hand out, planned as a reader's program, beside the lesson's rows."""

import json
import shutil

import pytest
from transformers import Qwen3Config

from helpers import models
from tests.lessons.cells import the_cell
from tests.script import run
from tight_fit.plans.model import plan_model
from tools.course import NOTEBOOKS

SCRIPT = NOTEBOOKS.parent / "scripts" / "finetune_llm.py"
TEXT = "wheat exports fell " * 1500  # more than 2,048 tokens


def test_the_fine_tune_of_lesson_23_takes_its_rung_and_the_logits_of_a_chunk(tmp_path):
    """Its rung "LoRA, NF4 base", of four layers: all layers are alike."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    names = {"Qwen3Config": Qwen3Config, "plan_model": plan_model}
    exec(the_cell("23", "config = Qwen3Config("), names)
    fields = names["config"].to_dict() | {"num_hidden_layers": 4, "layer_types": None}
    config = Qwen3Config(**fields)
    for file in (models.MINI / "decoder").glob("*"):
        if file.name.startswith(("tokenizer", "chat")):
            shutil.copy(file, tmp_path)
    told = config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(told), encoding="utf8")
    row = json.dumps({"prompt": "What fell?", "answer": TEXT})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 8, encoding="utf8")
    files = ("--model", tmp_path, "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "adapter")
    asked = (*files, "--batch", 1, "--steps", 4, "--held", 0)
    facts = run(str(SCRIPT), *map(str, asked), gpu="A100-80GB", seconds=300)

    exec(the_cell("23", 'lora = dict(base="nf4"').partition("plans[")[0], names)
    step = names["short"] | names["lora"] | {"precision": "bf16", "checkpointing": True}
    planned = plan_model(config, **step)
    parameters = planned.at_peak["parameters"]
    assert facts["at_peak"]["parameters"] == pytest.approx(parameters, rel=0.01)
    chunk = 256 * config.vocab_size * 4  # bytes of its logits, which are there twice
    assert 0 < facts["peak"] - planned.peak < 2 * chunk
