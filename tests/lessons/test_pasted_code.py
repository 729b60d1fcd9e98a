"""Each lesson's own code, planned as the program that it is: it takes what the lesson's table says,
in memory and in seconds.

The cells under "In your own code" are joined to a program. Only what is tiny there, so that a page
runs in seconds, becomes what the table is of: the model's configuration, and the batch. Then
`tight_fit.script` plans the program as any reader's, and the lesson's recipe is planned beside it.
"""

import json
from types import SimpleNamespace

import pytest

from helpers import models
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.lessons.cells import own_code
from tests.script import run

BASE = Recipe("deberta", profile="full", batch_size=16, length=256)
LARGE = Recipe("deberta-large", profile="full", batch_size=4, length=128)
TEXTS = "tokens, labels = torch.randint(5, 100, (16, 256)), torch.arange(16) % 2\n"
ROWS = ("torch.randint(5, 100, (12,))", "torch.randint(5, 100, (256,))")
ON_THE_GPU = "model.to('cuda')\ntokens, labels = tokens.to('cuda'), labels.to('cuda')\n"


def program(number: str, wanted: tuple[str, ...], recipe: Recipe, *changes: tuple[str, str]) -> str:
    """A lesson's cells as a program of the size of `recipe`. Each change must be found."""
    text = own_code(number, wanted, *changes)
    config = json.dumps(models.config(recipe).to_dict())
    head = "import json\nimport tempfile\nimport torch\nfrom torch import nn\n"
    return f"{head}FULL = json.loads({config!r})\n{text}"


def made(old: str, name: str = "model") -> tuple[str, str]:
    """The line that makes the tiny model, with the full configuration, on the GPU."""
    return old, f"{name} = DebertaV2ForSequenceClassification(DebertaV2Config(**FULL)).to('cuda')"


TINY = "DebertaV2ForSequenceClassification(DebertaV2Config(vocab_size=100, **sizes))"
CASES = {
    "02": (
        replace(BASE, accumulation=4, precision="fp16"),
        ("vocab_size=100, hidden_size=32", "gradient_accumulation_steps=4"),
        ("model = DebertaV2ForSequenceClassification(config)", made("")[1]),
        ROWS,
        ("max_steps=4,", "max_steps=4,\n    fp16=True,"),
    ),
    "05": (
        replace(LARGE, optimizer="adamw8bit_embed32"),
        ("manager.register_module_override", "manager.initialize()"),
        made(f"model = {TINY.replace('=100', '=1000')}"),
        (
            "tokens, labels = torch.randint(5, 1000, (16, 12)), torch.arange(16) % 2",
            "tokens, labels = torch.randint(5, 1000, (4, 128)), torch.arange(4) % 2\n" + ON_THE_GPU,
        ),
    ),
    "06": (
        replace(BASE, checkpointing=True),
        ("activation_checkpointing_enable", "missing = [name"),
        made(f"model = {TINY}"),
        ("torch.randint(5, 100, (4, 12))", "torch.randint(5, 100, (16, 256)).to('cuda')"),
        ("torch.tensor([0, 1, 0, 1])", "(torch.arange(16) % 2).to('cuda')"),
    ),
    "07": (
        replace(BASE, lora_rank=8, lora_targets="all-linear"),
        ("from peft import LoraConfig", "settings = LoraConfig", "trained = [p for p"),
        made("model = DebertaV2ForSequenceClassification(config)"),
        ("pretrained = {name: p.clone() for name, p in model.state_dict().items()}\n", ""),
        (
            "tokens, labels = torch.randint(5, 100, (16, 12)), torch.arange(16) % 2\n",
            TEXTS + ON_THE_GPU,
        ),
    ),
}  # fmt: skip


CASES["00"] = (
    BASE,
    ("def peak_of(", "def train_step("),
    (
        "model = nn.Sequential(nn.Linear(100, 400), nn.GELU(), nn.Linear(400, 10)).to(device)",
        "from transformers import DebertaV2Config, DebertaV2ForSequenceClassification\n"
        + made("")[1],
    ),
    ("torch.randn(64, 100, device=device)", "torch.randint(5, 100, (16, 256), device=device)"),
    ("torch.arange(64, device=device) % 10", "torch.arange(16, device=device) % 2"),
    ("model(batch)", "model(batch).logits"),
)
CASES["20"] = (
    Recipe(
        "decoder", profile="full", batch_size=4, length=512, precision="bf16", attention="sdpa",
        loss="chunked", checkpointing=True, base="bf16", optimizer="adamw_stochastic",
    ),
    ("def in_chunks(", "vocab_size=500, num_key", "labels[1, 24:]", "optimizer = StochasticAdamW("),
    ("import checkpoint\n", "import checkpoint\nimport torch.nn.functional as F\n"),
    (
        "Qwen3Config(vocab_size=500, num_key_value_heads=2, head_dim=16, **sizes)",
        "Qwen3Config(**FULL)",
    ),
    ("torch.randint(500, (2, 32)", "torch.randint(500, (4, 512)"),
    ("wanted, 16)", "wanted)"),
)  # fmt: skip
QUICK = ("00", "02", "06")  # of ways that the others have as well


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in QUICK else pytest.mark.night) for n in CASES]
)
def test_a_lesson_s_own_code_takes_what_its_table_says(number, tmp_path):
    if number == "05":
        pytest.importorskip("bitsandbytes")
    if number == "07":
        pytest.importorskip("peft")
    recipe, wanted, *changes = CASES[number]
    path = tmp_path / "train.py"
    path.write_text(program(number, wanted, recipe, *changes), encoding="utf8")
    facts, planned = run(str(path), gpu="A100-80GB", seconds=300), plan(recipe)
    assert facts["peak"] == pytest.approx(planned.peak, rel=0.01)
    assert facts["seconds"] == pytest.approx(planned.seconds("A100-80GB").total, rel=0.05)


def test_every_second_layer_is_what_transformers_makes_of_two():
    """Lesson 06: the row of its table, and the argument that it names, checkpoint the same ones."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.DebertaV2Config(vocab_size=9, num_hidden_layers=5, **sizes)
    by_name, by_hand = (transformers.DebertaV2ForSequenceClassification(config) for _ in "ab")
    by_name.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)
    by_hand.activation_checkpointing_enable({"use_reentrant": False})
    names = {"replace": lambda *given, **more: None, "plan": lambda lean, change: change(by_hand)}
    names["show"] = SimpleNamespace(plans=lambda rows: None)
    exec(own_code("06", ("def every_second(",)), names | {"large": None})
    on = [layer.gradient_checkpointing for layer in by_name.deberta.encoder.layer]
    assert on == [layer.gradient_checkpointing for layer in by_hand.deberta.encoder.layer]
    assert on == [True, False, True, False, True]
