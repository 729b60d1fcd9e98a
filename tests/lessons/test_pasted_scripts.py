"""What lessons hand out, planned as a reader's program, beside the lesson's rows: scripts, lines of
language models, and of several GPUs."""

import json
import shutil
import textwrap

import pytest
from transformers import LlamaConfig, Qwen3Config

from helpers import models
from tests.lessons.cells import facts_of, markdown_of, own_code, the_cell, with_full
from tests.script import run
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_layout, plan_step
from tight_fit.models import names as model_names
from tight_fit.models.config import read
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model
from tight_fit.script.given import load_what_is_mentioned
from tight_fit.script.program import Refused
from tight_fit.script.ranks import ProgramRank
from tools.course import NOTEBOOKS

SCRIPTS = NOTEBOOKS.parent / "scripts"
SCRIPT = SCRIPTS / "finetune_llm.py"
SHORT = {"num_hidden_layers": 4, "layer_types": None}
FOUR_TEXTS = "torch.arange(100, 180).view(4, 1, 20)"  # of lesson 14's loop
TEXT = "wheat exports fell " * 1500  # more than 2,048 tokens


def test_the_fine_tune_of_lesson_23_takes_its_rung_and_the_logits_of_a_chunk(tmp_path):
    """Its rung "LoRA, NF4 base", of four layers: all layers are alike."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    names = {"Qwen3Config": Qwen3Config, "plan_model": plan_model}
    exec(the_cell("23", "config = Qwen3Config("), names)
    fields = names["config"].to_dict() | {"num_hidden_layers": 4, "layer_types": None}
    config = Qwen3Config(**fields)
    _laid_out(tmp_path, config, "Qwen3ForCausalLM")
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


@pytest.mark.night
def test_the_lines_of_lesson_26_take_their_row(tmp_path):
    """TRL's trainer as the first screen has it, with four layers, beside "adapters off, in chunks".

    On a GPU TRL's kernels of Triton work in place, and hold nothing.
    """
    pytest.importorskip("peft")
    pytest.importorskip("trl", minversion="1.16")
    names = {"needs": lambda *packages: None}
    exec(the_cell("26", "pair = dict(").partition("plans = ")[0], names)
    config = read(names["LLAMA"])
    config.num_hidden_layers = 4
    _laid_out(tmp_path, config, "LlamaForCausalLM")
    head = f"""
from datasets import Dataset
name, answers = {str(tmp_path)!r}, [{TEXT!r}] * 16
pairs = Dataset.from_dict({{"prompt": ["?"] * 16, "chosen": answers, "rejected": answers}})
"""
    lines = markdown_of("26").split("```python\n")[1].split("```")[0]
    out = f'{str(tmp_path / "out")!r}, max_steps=4, report_to="none", '
    assert lines.count('"out", ') == 1
    text = head + lines.replace('"out", ', out)
    (tmp_path / "train.py").write_text(text, encoding="utf8")
    load_what_is_mentioned(str(tmp_path / "train.py"), ())  # as the command does
    facts = facts_of(tmp_path, text, "H100")
    planned = plan_model(config, **names["pair"] | names["ways"]["adapters off, in chunks"])
    assert facts["peak"] == pytest.approx(planned.peak, rel=0.01)


@pytest.mark.parametrize(
    "script, layout, optimizer",
    [
        ("ddp", "ddp=2", "adamw_foreach"),  # lesson 13
        pytest.param("fsdp", "fsdp=2", "adamw", marks=pytest.mark.night),  # lesson 14
    ],
)
def test_a_script_of_images_takes_what_its_layout_is_planned_to(
    script, layout, optimizer, tmp_path
):
    """With ViT-B/16 and 64 images, on one of two GPUs."""
    name = "google/vit-base-patch16-224-in21k"
    config = {**model_names.known()[name], "architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf8")
    arguments = ("--model", str(tmp_path), "--batch-size", "64")
    two = ProgramRank(1, 2)
    facts = run(str(SCRIPTS / f"{script}.py"), *arguments, gpu="RTX 3060", seconds=300, rank=two)
    plain = {"optimizer": optimizer, "max_grad_norm": None}  # as the script is
    job = ModelStep(read(name), batch_size=64, classes=10, **plain)
    _as_planned(facts, plan_step(job, parse(layout)))


@pytest.mark.parametrize(
    "layout, more",
    [
        ("zero2=4", ", reshard_after_forward=False"),
        pytest.param("fsdp=4", "", marks=pytest.mark.night),
    ],
)
def test_the_sharded_decoder_of_lesson_14_takes_what_its_table_says(layout, more, tmp_path):
    """Its `shard` and its loop, with a model that is on the host until it is sharded, of four
    layers: all layers are alike."""
    config = Qwen3Config(**read("Qwen/Qwen3-0.6B").to_dict() | SHORT)
    text = "from torch import distributed\n"
    text += "from torch.distributed.device_mesh import init_device_mesh\n"
    text += "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
    text += the_cell("14", "def shard(")
    text += f"""
distributed.init_process_group("nccl")
model = Qwen3ForCausalLM(Qwen3Config(**FULL)).train()
model.gradient_checkpointing_enable()
shard(model, mesh=init_device_mesh("cuda", (4,)){more})
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(5):
"""
    own = "torch.ones(1, 1, 512, dtype=torch.int64, device='cuda')"
    loop = the_cell("14", "set_requires_gradient_sync(")
    assert loop.count(FOUR_TEXTS) == 1
    text += textwrap.indent(loop.replace(FOUR_TEXTS, own), "    ")
    text = with_full(config.to_dict(), text)
    facts = facts_of(tmp_path, text, "RTX 3060", rank=ProgramRank(1, 4))
    job = ModelStep(config, 4, 512, weights="fp32", precision="bf16", checkpointing=True)
    _as_planned(facts, plan_step(job, parse(layout)))


VIEWS = ("DataParallel(tiny)", "DataParallel(tiny, gradient_as_bucket_view=True)")
STAY = ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)")


@pytest.mark.night
@pytest.mark.parametrize(
    ("changes", "views"), [((), False), ((VIEWS,), False), ((VIEWS, STAY), True)]
)
def test_the_step_of_data_parallelism_takes_what_its_table_says(changes, views, tmp_path):
    """Lesson 13: the pasted step in fp16, with accumulation, on one of two GPUs. Views of the
    buckets save something only where the gradients stay in them."""
    name = "microsoft/deberta-v3-base"
    call = "train_step(model, micro_batches, optimizer, scaler, "
    text = own_code(
        "13",
        ("def train_step(", "micro_batches = [("),
        ("DebertaV2Config(vocab_size=100, **sizes))", "DebertaV2Config(**FULL)).to('cuda')"),
        ('"gloo", store=dist.HashStore(), rank=0, world_size=1', '"nccl"'),
        ('GradScaler("cpu")', 'GradScaler("cuda")'),
        ("start = tiny.classifier.weight.clone()\n", ""),
        ("(4, 12))}", "(8, 256)).cuda()}"),
        ("torch.arange(4) % 2)", "torch.arange(8).cuda() % 2)"),
        (f'{call}torch.device("cpu"))', f'for step in range(5):\n    {call}torch.device("cuda"))'),
        ('print("the step was made:", not torch.equal(start, tiny.classifier.weight))\n', ""),
        ("dist.destroy_process_group()", ""),
        *changes,
    )
    head = "import contextlib\nimport torch.distributed as dist\nimport torch.nn.functional as F\n"
    head += "from torch.nn.parallel import DistributedDataParallel\n"
    text = with_full(read(name).to_dict(), head + text)
    facts = facts_of(tmp_path, text, "T4", rank=ProgramRank(1, 2))
    job = ModelStep(read(name), batch_size=64, length=256, accumulation=4, precision="fp16")
    _as_planned(facts, plan_step(job, parse("ddp=2", gradient_as_bucket_view=views)))


def test_the_lines_of_lesson_27_take_what_is_planned(tmp_path):
    """On a GPU with FP8, where nothing emulates it."""
    pytest.importorskip("torchao", minversion="0.16")
    sizes = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    config = sizes | heads | {"tie_word_embeddings": False, "use_cache": False}
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
    head = "import logging\nfrom transformers import Qwen3Config, Qwen3ForCausalLM\n"
    facts = facts_of(tmp_path, with_full(config, head + text), "H100")
    step = {"batch_size": 4, "length": 128, "weights": "bf16", "optimizer": "adamw"}
    planned = plan_model(Qwen3Config(**config), **step, float8="rowwise", max_grad_norm=None)
    assert facts["peak"] == pytest.approx(planned.peak, rel=0.01)


def test_the_prototype_of_context_parallelism_is_refused_as_lesson_24_says(tmp_path):
    """Also where a layout with context ranks was planned in this process. Where the program is
    planned one day: compare its activations with those of `context=2`."""
    assert "`tight-fit script` refuses the prototype" in markdown_of("24")
    sizes = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False)
    plan_layout(config, parse("context=2"), batch_size=2, length=256)
    _laid_out(tmp_path, config, "LlamaForCausalLM")
    text = own_code("24", ("set_rotate_method(", "def in_chunks(", "def split_step(", "def train("))
    text += f"\ntrain({str(tmp_path)!r}, [torch.ones(1, 256, dtype=torch.int64)] * 3)\n"
    with pytest.raises(Refused, match="attention.* does not have a sharding strategy"):
        facts_of(tmp_path, f"import torch\n{text}", "A100-80GB", rank=ProgramRank(1, 2))


def _laid_out(folder, config, kind):
    """A folder with the configuration of such a model, and the mini decoder's tokenizer."""
    for file in (models.MINI / "decoder").glob("*"):
        if file.name.startswith(("tokenizer", "chat")):
            shutil.copy(file, folder)
    told = config.to_dict() | {"architectures": [kind]}
    (folder / "config.json").write_text(json.dumps(told), encoding="utf8")


def _as_planned(facts, planned):
    """A program's rank takes and sends what the plan of its layout says."""
    assert facts["peak"] == pytest.approx(planned.peak, rel=0.01)
    sent = sum(count for _, count in facts["rank"]["sent"].values())
    assert sent == pytest.approx(sum(message.bytes for message in planned.sent), rel=0.01)
