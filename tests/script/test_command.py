"""`tight-fit script`: what a program sees under its plan, what is printed, and the exit codes."""

import json
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from tests.script import HEAD, LOOP, STEP, run
from tight_fit import plan_program
from tight_fit.command import main as tight_fit
from tight_fit.command import script as command
from tight_fit.gpus import CONTEXT, find
from tight_fit.script import program_report, remedies

PROGRAMS = Path(__file__).parent / "programs"
ZERO = "    optimizer.zero_grad()\n"


def test_exit_codes_and_json(program, capsys):
    assert command.main([program(LOOP), "--gpu", "T4", "--json"]) == command.FITS
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] and facts["optimizers"] == ["AdamW"]
    assert facts["peak"] <= facts["allocated"] and facts["remedies"] == []
    large = LOOP.replace("256", "30_000")
    assert command.main([program(large), "--gpu", "T4", "--quick"]) == command.TOO_LARGE
    out = capsys.readouterr().out
    assert "NO, it does not fit on a T4" in out and "train.py:4: parameters" in out


def test_the_first_word_chooses_the_command(monkeypatch):
    called = []
    monkeypatch.setattr(tight_fit, "main", lambda prog: called.append("model"))
    monkeypatch.setitem(tight_fit.PROGRAMS, "script", lambda *given: called.append(given))
    for words in (["roberta-base"], ["script", "train.py", "--gpu", "T4"], []):
        monkeypatch.setattr(sys, "argv", ["tight-fit", *words])
        tight_fit.entry()
    assert called == ["model", (["train.py", "--gpu", "T4"], "tight-fit script"), "model"]


def test_values_of_data_are_real_and_those_of_weights_are_one(program):
    """Masks, lengths and random numbers keep their values on the GPU; a loss does not. What follows
    from weights is 1 in a tensor on the host as well. Products may give another dtype."""
    text = LOOP.replace(
        ZERO,
        f"{ZERO}"
        "    mask = (torch.arange(8) % 3 == 0).to(device)\n"
        "    assert mask.sum().item() == 3 and mask.any() and not mask.all()\n"
        "    assert mask.nonzero().shape == (3, 1) and mask.tolist()[:2] == [True, False]\n"
        "    assert model(torch.ones(8, 256, device=device))[mask].shape == (3, 256)\n"
        "    mask.logical_not_(); assert mask.sum().item() == 5\n"
        "    assert loss.item() == 1 and not torch.isnan(loss) and torch.isfinite(loss)\n"
        "    assert loss.detach().cpu().numpy().shape == ()\n"
        "    assert str(loss.device) == 'cuda:0' and loss.is_cuda\n"
        "    assert f'{loss:.3f} {mask.sum():d}' == '1.000 5'\n"
        "    losses = torch.zeros(4)\n"
        "    losses[1] = loss.detach()\n"
        "    losses[2:].copy_(torch.full((2,), 7.0, device=device))\n"
        "    assert losses[1:].tolist() == [1, 7, 7], losses\n"
        "    half = torch.rand(8, 8, device=device, dtype=torch.float16)\n"
        "    total = torch.zeros(8, 8, device=device)\n"
        "    torch.addmm(total, half, half, out_dtype=torch.float32, out=total)\n",
    )
    asked = set(run(program(text))["asked"])
    assert asked >= {"train.py:14", "train.py:15", "train.py:17"}
    assert not asked & {f"train.py:{line}" for line in range(9, 14)}, "the mask is data"


def test_a_program_is_told_of_the_gpu_and_ends_before_anything_is_saved(program):
    gpu = find("T4")
    free = gpu.memory - CONTEXT - 4 * (256 * 256 + 256)
    loop = LOOP.replace(
        "for step",
        f"assert torch.cuda.mem_get_info() == ({free}, {gpu.memory})\n"
        "assert torch.cuda.get_device_name() == 'T4' and torch.cuda.device_count() == 1\n"
        "assert torch.cuda.get_device_capability() == (7, 5)\n"
        "assert not torch.cuda.is_bf16_supported(including_emulation=False)\nfor step",
    )
    text = (
        "import os\nos.makedirs('runs/a'); open('runs/a/log', 'w').write('x')\n"
        "assert open('runs/a/log').read() == 'x' and os.listdir('runs') == ['a']\n"
        f"{loop}    assert torch.cuda.max_memory_allocated() >= 4 * 256 * 256 * 4\n"
        "    assert torch.cuda.memory_allocated() < torch.cuda.max_memory_allocated()\n"
        "    torch.save(model, 'm.pt')\ntorch.save(model, 'last.pt')\nopen('end', 'w')\n"
    )
    assert run(program(text))["card"] == "T4"
    assert sorted(path.name for path in Path().iterdir()) == ["train.py"]


def test_any_one_gpu_may_be_chosen(program):
    """By its number, or as the one of nn.DataParallel, which is said."""
    peak = run(program(LOOP))["peak"]
    for chosen in ("device = 'cuda:3'", "torch.cuda.set_device(3)"):
        text = LOOP.replace("model = ", f"{chosen}\nmodel = ", 1)
        text += "    assert loss.device == torch.device('cuda:3') and loss.get_device() == 3\n"
        assert run(program(text))["peak"] == peak
    facts = run(program(LOOP.replace("for step", "model = nn.DataParallel(model)\nfor step")))
    assert facts["peak"] == peak
    assert "train.py:6: nn.DataParallel is planned with one GPU" in facts["notes"][0]


def test_memory_that_each_step_keeps_is_said_with_its_line_and_its_end(program):
    """2,048 × 512 numbers of 4 bytes a step. What the end of a program frees is no part of its last
    step; neither what is kept for one step only nor a loss is growth."""
    size, keep = 2048 * 512 * 4, "kept.append(torch.zeros(2048, 512, device=device))\n"
    facts = run(program(f"{HEAD}kept = []\nfor step in range(100):\n{STEP}    {keep}"))
    assert facts["growth"] == {"bytes": size, "lines": ["train.py:12"]}
    steps = facts["regular"] + (facts["card_memory"] - facts["need"]) // size
    assert f"about {steps / 1000:.3g} k steps fit, and no more" in program_report.verdict(facts)[-1]
    loader = "for rows in torch.utils.data.DataLoader(range(64), 8):\n"
    assert run(program(f"{HEAD}kept = []\n{loader}    {keep}{STEP}"))["growth"]["bytes"] == size
    once = f"{HEAD}losses = []\nfor step in range(100):\n{STEP}    losses.append(loss.detach())\n"
    assert run(program(f"{once}    kept = []; {keep}"))["growth"] is None


def test_a_part_of_the_memory_is_all_that_pytorch_gets(program):
    text = LOOP.replace("256", "8_000")
    limit = "torch.cuda.set_per_process_memory_fraction(0.05); device ="
    whole, part = run(program(text)), run(program(text.replace("device =", limit, 1)))
    assert whole["fits"] and not part["fits"] and whole["need"] == part["need"]
    assert part["card_memory"] == int(0.05 * find("T4").memory) + CONTEXT
    assert "train.py:3 lets PyTorch have 5% of the GPU" in program_report.verdict(part)[-1]


def test_a_batch_size_that_is_searched_is_said_to_be_the_first(program):
    """As accelerate's decorator does, and Trainer's auto_find_batch_size by it."""
    step = STEP.replace("    ", "        ").replace("rand(8,", "rand(batch_size,")
    text = (
        f"{HEAD}from accelerate.utils import find_executable_batch_size\n"
        "@find_executable_batch_size(starting_batch_size=96)\n"
        f"def train(batch_size):\n    for step in range(100):\n{step}train()\n"
    )
    (note,) = plan_program(program(text), "T4").facts["notes"]
    assert note.startswith("train.py:7 searches its batch size") and "it tries, 96;" in note


DYNAMIC = """\
import torch
from torch import nn
from torch.utils.data import DataLoader
rows = [torch.full((5 + (37 if index == 90 else index % 7),), index) for index in range(100)]
collate = lambda batch: nn.utils.rnn.pad_sequence(batch, batch_first=True)
loader = DataLoader(rows, batch_size=4, collate_fn=collate)
model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters())
for epoch in range(9):
    for batch in loader:
        model(batch.cuda()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_longest_possible_batch_is_found_and_planned(program):
    facts = run(program(DYNAMIC))
    assert facts["batch_seen"] == [4, 11] and facts["batch_longest"] == [4, 42]
    assert facts["peak"] > facts["peak_seen"] and facts["examples"] == 100
    assert "the longest possible 4 × 42" in "\n".join(program_report.verdict(facts))


@pytest.mark.night
def test_remedies_are_planned_and_worded_for_the_program(tiny, program):
    """Each is compared with the same program in which its words have been written."""
    path = str(PROGRAMS / "text_classification_loop.py")
    arguments = (str(tiny / "bert"), "16")

    def plan(change):
        facts = run(path, *arguments, seconds=100.0, change=change)
        return {**facts, "fits": change.get("accumulation") == 4}  # as on a GPU of that size

    facts = plan({})
    found = {tuple(r.change.items()): r for r in remedies.find(facts, find("T4"), plan)}
    best = found[(("accumulation", 4),)]
    written = Path(path).read_text()
    lines = written.splitlines()
    made = next(number for number, line in enumerate(lines, 1) if "= DataLoader(" in line)
    assert best.fits and f"loop.py:{made}: batch_size=4, " in best.words
    assert found[(("precision", "fp16"),)].words.startswith('torch.autocast("cuda", torch.float16)')
    assert {"checkpointing", "optimizer"} <= {change[0][0] for change in found}
    for line in ("optimizer.step()", "optimizer.zero_grad()"):
        written = written.replace(line, f"(number + 1) % 4 or {line}")
    written = written.replace("for batch in loader", "for number, batch in enumerate(loader)")
    assert run(program(written), arguments[0], "4")["need"] == best.need


def test_a_peak_that_is_a_copy_for_cublas_is_planned(program, capfd):
    """A gradient that was expanded is copied for a product, and the copy is alive at the peak."""
    text = (
        "import torch\nm = torch.nn.Linear(4, 4).cuda()\n"
        "o = torch.optim.SGD(m.parameters(), lr=.1)\n"
        "for _ in range(9):\n    m(torch.randn(2, 4).cuda()).sum().backward()\n"
        "    o.step()\n    o.zero_grad()\n"
    )
    assert command.main([program(text), "--gpu", "T4", "--quick"]) == command.FITS
    assert "copy for cuBLAS" in capfd.readouterr().out


def test_data_sets_are_found_where_the_program_keeps_them(program, tmp_path):
    """A folder of the program's own that a planned run does not write to."""
    Path("rows.jsonl").write_text("".join(f'{{"number": {row}}}\n' for row in range(32)))
    text = (
        "from datasets import load_dataset\n"
        "rows = load_dataset('json', data_files='rows.jsonl', cache_dir='kept')['train']\n"
        "rows = rows.map(lambda row: {'twice': 2 * row['number']})\n"
        "assert rows[3]['twice'] == 6\n"
    )
    assert run(program(text + LOOP))["fits"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "train.py"]


def test_a_mirror_is_looked_at_first(program, tmp_path, monkeypatch):
    """A program's `from_pretrained` finds what TIGHT_FIT_MIRROR holds of a model of the hub."""
    folder = tmp_path / "mirror" / "models" / "nobody" / "tiny"
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    folder.joinpath("config.json").write_text(json.dumps({"model_type": "bert", **sizes}))
    text = """\
import torch
from transformers import AutoModel
model, told = AutoModel.from_pretrained('nobody/tiny', output_loading_info=True)
assert not told['missing_keys'] and not told['error_msgs']
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(2, 8, dtype=torch.long).cuda())[0].mean().backward()
    optimizer.step()
"""
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path / "mirror"))
    counted = BertModel(BertConfig(**sizes)).num_parameters()
    assert counted <= run(program(text))["parameters"] <= counted + 1024  # positions are a buffer
