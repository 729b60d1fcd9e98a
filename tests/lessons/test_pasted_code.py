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
from tests.lessons.cells import facts_of, own_code, with_full

BASE = Recipe("deberta", profile="full", batch_size=16, length=256)
LARGE = Recipe("deberta-large", profile="full", batch_size=4, length=128)
LADDER = Recipe("deberta-large", profile="full", batch_size=16, length=512)
TEXTS = "tokens, labels = torch.randint(5, 100, (16, 256)), torch.arange(16) % 2\n"
ROWS = ("torch.randint(5, 100, (12,))", "torch.randint(5, 100, (256,))")
ON_THE_GPU = "model.to('cuda')\ntokens, labels = tokens.to('cuda'), labels.to('cuda')\n"


def program(number: str, wanted: tuple[str, ...], recipe: Recipe, *changes: tuple[str, str]) -> str:
    """A lesson's cells as a program of the size of `recipe`. Each change must be found."""
    text = own_code(number, wanted, *changes)
    text = f"import tempfile\nfrom torch import nn\n{text}"
    return with_full(models.config(recipe).to_dict(), text)


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
    "03": (
        replace(BASE, frozen=6),
        ("def freeze(", "freeze(model.deberta.encoder.rel", "trained = [p for p"),
        ("model = DebertaV2ForSequenceClassification(config)", f"{TEXTS}{made('')[1]}"),
        ("encoder.layer[:2])", "encoder.layer[:6])"),
        ('print("embeddings, layers 1 to 4:", backward_enters())\n', ""),
        (
            "start = {name: p.detach().clone() for name, p in model.named_parameters()}\n",
            ON_THE_GPU,
        ),
        (
            "for name, p in model.named_parameters():\n"
            "    unchanged = torch.equal(p, start[name])\n"
            "    assert unchanged == (not p.requires_grad)\n",
            "",
        ),
    ),
    "04": (
        replace(BASE, precision="fp16"),
        ("tiny = Deberta", "bf16=has_bf16"),
        made(f"tiny = {TINY}", "gpu, has_bf16 = True, False\ntiny"),
        ROWS,
        ("max_steps=4,", "max_steps=4,\n    per_device_train_batch_size=16,"),
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
    "19": (
        replace(
            LADDER, accumulation=4, precision="fp16", checkpointing=True, frozen=12,
            optimizer="adamw8bit_embed32",
        ),
        (
            "from transformers import Trainer",
            "norm_rel_ebd=",
            'optim="adamw_torch"',
            "frozen +=",
        ),
        ("model = DebertaV2ForSequenceClassification(config)", made("")[1]),
        ("torch.randint(5, 100, (12,))", "torch.randint(5, 100, (512,))"),
        ('optim="adamw_torch"', 'optim="adamw_bnb_8bit"'),
    ),
}  # fmt: skip


VIT = Recipe("vit", profile="full")
CASES["01"] = (
    replace(VIT, batch_size=32, precision="fp16"),
    ("digits = train.encoded(",),
    (
        'digits = train.encoded(Recipe("vit", train_size=100))\n',
        "from transformers import ViTConfig, ViTForImageClassification\n"
        "model = ViTForImageClassification(ViTConfig(**FULL)).to('cuda')\n",
    ),
    (
        '    batch = digits["train"].batch(torch.randperm(100)[:16])\n',
        "    batch = {'labels': torch.arange(32, device='cuda') % 10}\n"
        "    batch['pixel_values'] = torch.randn(32, 3, 224, 224, device='cuda')\n",
    ),
    (
        "    loss = model(**batch).loss\n    loss.backward()\n    optimizer.step()\n",
        "    with torch.autocast('cuda', torch.float16):\n        loss = model(**batch).loss\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
    ),
    ("torch.manual_seed(0)\n", "scaler = torch.amp.GradScaler('cuda')\n"),
    ("model.eval()\n", "raise SystemExit\n"),
)
CASES["11"] = (
    replace(VIT, batch_size=64, accumulation=4, precision="bf16"),
    ("from transformers import ViTConfig", "fabric.clip_gradients(model, optimizer"),
    (
        "model = ViTForImageClassification(config)",
        "from lightning_fabric import Fabric\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "model = ViTForImageClassification(ViTConfig(**FULL))",
    ),
    (
        "torch.randn(64, 1, 16, 16), torch.randint(3, (64,))",
        "torch.randn(128, 3, 224, 224), torch.arange(128) % 10",
    ),
    ("batch_size=4)", "batch_size=16)"),
)
SIXTEEN = replace(BASE, precision="fp16")
READER = (  # of texts that are cut at 256 tokens
    "from transformers import AutoTokenizer, DebertaV2Config, DebertaV2ForSequenceClassification\n"
    f"tokenizer = AutoTokenizer.from_pretrained({str(models.MINI / 'deberta')!r})\n"
    "text = 'oil prices rose and wheat fell ' * 100\n"
)
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
CASES["08"] = (
    BASE,
    ("tokens = news.select(", "prefetch_factor=2,  #"),
    (
        "def tokenize(batch):",
        f"{READER}from datasets import Dataset\nfrom torch.utils.data import DataLoader\n"
        "news = Dataset.from_dict({'text': [text] * 200, 'label': [0, 1] * 100})\n"
        f"device = 'cuda'\n{made('')[1]}\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n\n"
        "def step(batch):\n    model(**batch).loss.backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n\n"
        "def tokenize(batch):",
    ),
    ("max_length=64", "max_length=256"),
    ("batch_size=8,", "batch_size=16,"),
)
CASES["09"] = (
    SIXTEEN,
    ("collator = DataCollatorWithPadding", "trainer.data_collator"),
    (
        "from torch.utils.data import DataLoader\n",
        f"{READER}{made('')[1]}\nfrom torch.utils.data import DataLoader\n"
        "from transformers import DataCollatorWithPadding\ntexts = [text] * 96\n",
    ),
    ("    loss = model(**batch).loss.item()\n", "    loss = 0\n"),
    ("per_device_train_batch_size=2,", "per_device_train_batch_size=16,\n    fp16=True,"),
    ("max_steps=2,", "max_steps=5,"),
)
CASES["10"] = (
    SIXTEEN,
    ("def buckets(", "batch_sampler=buckets(", 'train_sampling_strategy="group_by_length"'),
    (
        "def cut(items",
        f"{READER}import numpy as np\nlengths, labels = [256] * 96, [0, 1] * 48\n\ndef cut(items",
    ),
    ("tokenizer = models.processor(news)\n", ""),
    ('data.columns["input_ids"][i, :n].tolist()', "[7] * n"),
    ("max_steps=2,", "max_steps=5,\n    fp16=True,"),
    ("model = models.build(news)", made("")[1]),
)
CASES["12"] = (
    replace(BASE, accumulation=4, precision="fp16", checkpointing=True),  # "DeBERTa-v3-base"
    (
        "from accelerate import Accelerator, DataLoaderConfig",
        "prepare(model, optimizer, loader)\nif",
    ),
    ("%%writefile train_12.py\n", ""),
    ("%%writefile -a train_12.py\n", ""),
    ("int(sys.argv[1])", "3"),
    ("gradient_accumulation_steps=2,", "mixed_precision='fp16', gradient_accumulation_steps=4,"),
    (
        "torch.randn(64, 8), torch.randint(3, (64,))",
        "torch.randint(5, 100, (64, 256)), torch.arange(64) % 2",
    ),
    (
        "model = torch.nn.Sequential("
        "torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))",
        "from transformers import DebertaV2Config, DebertaV2ForSequenceClassification\n"
        f"{made('')[1]}\nmodel.gradient_checkpointing_enable()",
    ),
    ("model(inputs), labels", "model(inputs).logits, labels"),
    ("first = 2 *", "first = 4 *"),
    ("first == 2 *", "first == 4 *"),
)
CASES["17"] = (
    replace(VIT, batch_size=64, precision="fp16"),
    ("def scaled(",),
    (
        "def scaled(",
        "import math\nfrom transformers import ViTConfig, ViTForImageClassification\n"
        "net = ViTForImageClassification(ViTConfig(**FULL)).to('cuda')\n\ndef scaled(",
    ),
    (
        "torch.randn(256, 8), torch.randint(3, (256,))",
        "torch.randn(64, 3, 224, 224, device='cuda'), torch.arange(64, device='cuda') % 10",
    ),
    (
        "    nn.functional.cross_entropy(net(inputs), labels).backward()\n",
        "    with torch.autocast('cuda', torch.float16):\n"
        "        loss = nn.functional.cross_entropy(net(inputs).logits, labels)\n"
        "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n",
    ),
    ("    optimizer.step()\n", "    scaler.step(optimizer)\n    scaler.update()\n"),
    ("for _ in range(steps):\n", "scaler = torch.amp.GradScaler('cuda')\nfor _ in range(steps):\n"),
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
QUICK = ("00", "02", "06", "13")  # of ways that the others have as well


@pytest.mark.night
def test_trainer_holds_the_images_of_all_micro_batches(tmp_path):
    """Lesson 17: its Trainer with LAMB takes what is planned, and those images besides."""
    recipe = replace(VIT, batch_size=64, accumulation=4)
    text = program(
        "17",
        ("class Lamb(", "def scaled(", "lamb = Lamb(", "optimizers=(lamb"),
        recipe,
        ("def scaled(", "import math\n\ndef scaled("),
        ("torch.optim.AdamW(net.", "() and torch.optim.AdamW(net."),
        ("schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)\n", ""),
        ("for _ in range(steps):", "for _ in ():"),
        (
            "ViTForImageClassification(config)",
            "ViTForImageClassification(ViTConfig(**FULL)).to('cuda')",
        ),
        ("torch.randn(1, 16, 16)", "torch.randn(3, 224, 224)"),
        ("i % 3} for i in range(64)", "i % 10} for i in range(256)"),
        ("per_device_train_batch_size=8", "per_device_train_batch_size=16"),
    )
    facts = facts_of(tmp_path, text, "A100-80GB")
    images = 3 * 16 * 3 * 224 * 224 * 4  # bytes of the micro-batches that wait
    assert facts["peak"] - plan(recipe).peak == pytest.approx(images, rel=0.01)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in QUICK else pytest.mark.night) for n in CASES]
)
def test_a_lesson_s_own_code_takes_what_its_table_says(number, tmp_path):
    if number in ("05", "19"):
        pytest.importorskip("bitsandbytes")
    needed = {"07": "peft", "11": "lightning_fabric"}
    if number in needed:
        pytest.importorskip(needed[number])
    recipe, wanted, *changes = CASES[number]
    facts = facts_of(tmp_path, program(number, wanted, recipe, *changes), "A100-80GB")
    assert facts["peak"] == pytest.approx(plan(recipe).peak, rel=0.01)
    # Fabric's AdamW is not fused (lab 11), the planned is. 19's table is planned 6 % slower than
    # its program, of which the reason is not known.
    apart = 0.07 if number in ("11", "19") else 0.05
    assert facts["seconds"] == pytest.approx(plan(recipe).seconds("A100-80GB").total, rel=apart)


@pytest.mark.night
def test_qlora_takes_what_is_planned_and_the_logits_of_a_chunk(tmp_path):
    """Lesson 21: its pasted loss holds a chunk's logits and their gradient, in fp32, besides."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    recipe = Recipe("decoder-1.7b", profile="full", batch_size=1, length=512, precision="bf16")
    recipe = replace(recipe, base="nf4", lora_rank=8, lora_targets="all-linear")
    recipe = replace(recipe, checkpointing=True, loss="chunked")
    config = models.config(recipe).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf8")
    text = own_code(
        "21",
        ("four = BitsAnd", "adapter = Lora", "def loss_sum(", "def learn("),
        ('models.MINI / "decoder"', repr(str(tmp_path))),
        ("tokenizer = AutoTokenizer.from_pretrained(name)\n", ""),
        ('model.add_adapter("profit", adapter)\n', ""),
        ("(name, **settings)", "(name, **settings, device_map='cuda')"),
        ('tokenizer(sentence, return_tensors="pt")["input_ids"]', "torch.ones(1, 512).long()"),
    )
    head = "import torch\nimport torch.nn.functional as F\n"
    head += "from torch.utils.checkpoint import checkpoint\n"
    facts = facts_of(tmp_path, f'{head}{text}learn("oil", "")\n', "A100-80GB")
    parameters = plan(recipe).at_peak["parameters"]
    assert facts["at_peak"]["parameters"] == pytest.approx(parameters, rel=0.01)
    chunk = 256 * config["vocab_size"] * 4  # bytes of its logits
    assert 0 < facts["peak"] - plan(recipe).peak < 2 * chunk


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
