"""`tight-fit script`: what it prints, what it refuses, and the exit codes."""

import json
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from tests.script import HEAD, LOOP, run
from tight_fit.command import main as tight_fit
from tight_fit.command import script as command
from tight_fit.gpus import find
from tight_fit.script import process, remedies, report
from tight_fit.script.program import ProgramFailed, Refused, ToPlan, script_of

PROGRAMS = Path(__file__).parent / "programs"
REFUSED = {  # more in tests/attack/test_programs.py
    "only evaluates": (f"{HEAD}model(torch.rand(2, 256).to(device))\n", "without a step"),
    "loops for ever": (f"{HEAD}while True:\n    pass\n", "was still running after 2 seconds"),
    "spawns processes": (
        f"{HEAD}import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n",
        "train.py:7: the program starts processes",
    ),
    "joins a group": (
        f"{HEAD}torch.distributed.init_process_group('nccl')\n",
        "train.py:6: the program joins a group",
    ),
    "routes by values": (
        LOOP.replace(
            "    optimizer.zero_grad()\n", "    rows = model.weight[model.weight[0] > 0]\n"
        ),
        "train.py:8: the shape of what",
    ),
    "needs a gated model": (
        "class GatedRepoError(OSError): pass\nraise GatedRepoError('401 for url')\n",
        "train.py:2 needs a gated model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_in_one_sentence_with_its_line(name, program):
    text, said = REFUSED[name]
    with pytest.raises(Refused) as error:
        run(program(text), seconds=2.0 if name == "loops for ever" else 60.0)
    assert said in str(error.value) and str(error.value).endswith(".")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_program_that_fails_shows_its_own_lines(program):
    text = f"{HEAD}def main():\n    return undefined\nmain()\n"
    with pytest.raises(ProgramFailed) as error:
        run(program(text))
    assert "before its first step: NameError" in str(error.value)
    assert error.value.lines == [
        "train.py:8 in <module>: main()",
        "train.py:7 in main: return undefined",
    ]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["accelerate", "launch", "train.py", "--gpu", "T4"], "train.py --gpu T4 --ranks 2"),
        (["--", "torchrun", "--nproc_per_node", "2", "train.py"], "torchrun launches a program"),
    ],
)
def test_bad_arguments_end_before_anything_runs(arguments, said, program, capsys):
    program("raise SystemExit('it ran')")
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    printed = capsys.readouterr()
    assert end.value.code == command.REFUSED and not printed.out
    assert said in printed.err and printed.err.count("\n") == 1


def test_exit_codes_and_json(program, capsys):
    assert command.main([program(LOOP), "--gpu", "T4", "--json"]) == command.FITS
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] and facts["optimizers"] == ["AdamW"]
    assert facts["peak"] <= facts["allocated"] and facts["remedies"] == []
    large = LOOP.replace("256", "30_000")
    assert command.main([program(large), "--gpu", "T4", "--quick"]) == command.TOO_LARGE
    out = capsys.readouterr().out
    assert "NO, it does not fit on a T4" in out and "train.py:4: parameters" in out
    assert command.main([program("1 / 0\n"), "--gpu", "T4"]) == command.FAILED
    assert "train.py:1 in <module>: 1 / 0" in capsys.readouterr().err
    assert command.main([program("pass\n"), "--gpu", "T4"]) == command.REFUSED


def test_the_first_word_chooses_the_command(monkeypatch):
    called = []
    monkeypatch.setattr(tight_fit, "main", lambda prog: called.append("model"))
    monkeypatch.setitem(tight_fit.PROGRAMS, "script", lambda *given: called.append(given))
    for words in (["roberta-base"], ["script", "train.py", "--gpu", "T4"], []):
        monkeypatch.setattr(sys, "argv", ["tight-fit", *words])
        tight_fit.entry()
    script = ["train.py", "--gpu", "T4"], "tight-fit script"
    assert called == ["model", script, "model"]


def test_values_of_data_are_real_and_those_of_weights_are_one(program):
    """Masks, lengths and random numbers keep their values on the GPU; a loss does not."""
    text = LOOP.replace(
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n"
        "    mask = (torch.arange(8) % 3 == 0).to(device)\n"
        "    assert mask.sum().item() == 3 and mask.any() and not mask.all()\n"
        "    assert mask.nonzero().shape == (3, 1) and mask.tolist()[:2] == [True, False]\n"
        "    assert model(torch.ones(8, 256, device=device))[mask].shape == (3, 256)\n"
        "    mask.logical_not_(); assert mask.sum().item() == 5\n"
        "    assert loss.item() == 1 and not torch.isnan(loss) and torch.isfinite(loss)\n"
        "    assert loss.detach().cpu().numpy().shape == ()\n"
        "    assert str(loss.device) == 'cuda:0' and loss.is_cuda\n"
        "    assert f'{loss:.3f} {mask.sum():d}' == '1.000 5'\n",
    )
    facts = run(program(text))
    assert set(facts["asked"]) == {"train.py:14", "train.py:15", "train.py:17"}


def test_real_tensors_hold_what_is_written_to_them(program):
    """What follows from weights is 1, in a tensor on the host as well; what does not is itself."""
    text = LOOP.replace(
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n"
        "    losses = torch.zeros(4)\n"
        "    losses[1] = loss.detach()\n"
        "    losses[2:].copy_(torch.full((2,), 7.0, device=device))\n"
        "    assert losses[1:].tolist() == [1, 7, 7], losses\n",
    )
    assert run(program(text))["fits"]


def test_products_that_give_another_dtype_are_planned(program):
    """`torch.addmm(..., out_dtype=...)`, as libraries sum gradients in fp32."""
    text = LOOP.replace(
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n"
        "    half = torch.rand(8, 8, device=device, dtype=torch.float16)\n"
        "    total = torch.zeros(8, 8, device=device)\n"
        "    torch.addmm(total, half, half, out_dtype=torch.float32, out=total)\n",
    )
    assert run(program(text))["peak"] > 0


def test_a_program_is_told_of_the_gpu_that_was_asked_for(program):
    text = (
        "import torch\n"
        "assert torch.cuda.get_device_name() == 'T4' and torch.cuda.device_count() == 1\n"
        "assert torch.cuda.get_device_capability() == (7, 5)\n"
        "assert not torch.cuda.is_bf16_supported(including_emulation=False)\n"
        f"{LOOP}    assert torch.cuda.max_memory_allocated() >= 4 * 256 * 256 * 4\n"
        "    assert torch.cuda.memory_allocated() < torch.cuda.max_memory_allocated()\n"
    )
    assert run(program(text))["card"] == "T4"


def test_the_run_ends_before_anything_is_saved(program):
    text = (
        "import os\nos.makedirs('runs/a'); open('runs/a/log', 'w').write('x')\n"
        "assert open('runs/a/log').read() == 'x' and os.listdir('runs') == ['a']\n"
        f"{LOOP}    torch.save(model, 'm.pt')\ntorch.save(model, 'last.pt')\nopen('end', 'w')\n"
    )
    run(program(text))
    assert sorted(path.name for path in Path().iterdir()) == ["train.py"]


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
    assert "the longest possible 4 × 42" in "\n".join(report.verdict(facts))


@pytest.mark.night
def test_remedies_are_planned_and_worded_for_the_program(tiny, program):
    """Each is compared with the same program in which its words have been written."""
    path = str(PROGRAMS / "text_classification_loop.py")
    arguments = ("--model", str(tiny / "bert"), "--batch_size", "16", "--fixed")
    work = script_of(path, arguments)

    def plan(change):
        facts = process.plan(ToPlan(path, arguments, find("T4"), change=change), work, 100.0)
        return {**facts, "fits": change.get("accumulation") == 4}  # as on a GPU of that size

    facts = plan({})
    found = {tuple(r.change.items()): r for r in remedies.find(facts, find("T4"), plan)}
    best = found[(("accumulation", 4),)]
    lines = Path(path).read_text().splitlines()
    made = next(number for number, line in enumerate(lines, 1) if "= DataLoader(" in line)
    assert best.fits and f"loop.py:{made}: batch_size=4, " in best.words
    assert found[(("precision", "fp16"),)].words.startswith('torch.autocast("cuda", torch.float16)')
    assert {"checkpointing", "optimizer"} <= {change[0][0] for change in found}
    smaller = ("--model", str(tiny / "bert"), "--batch_size", "4", "--fixed")
    written = Path(path).read_text()
    for line in ("optimizer.step()", "optimizer.zero_grad()"):
        written = written.replace(line, f"(number + 1) % 4 or {line}")
    written = written.replace("for batch in loader", "for number, batch in enumerate(loader)")
    assert run(program(written), *smaller)["need"] == best.need


def test_a_peak_that_is_a_copy_for_cublas_is_planned(tmp_path, capfd):
    """A gradient that was expanded is copied for a product, and the copy is alive at the peak."""
    (tmp_path / "train.py").write_text(
        "import torch\nm = torch.nn.Linear(4, 4).cuda()\n"
        "o = torch.optim.SGD(m.parameters(), lr=.1)\n"
        "for _ in range(9):\n    m(torch.randn(2, 4).cuda()).sum().backward()\n"
        "    o.step()\n    o.zero_grad()\n"
    )  # fmt: skip
    assert command.main([str(tmp_path / "train.py"), "--gpu", "T4", "--quick"]) == 0
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
    text = (
        "import torch\n"
        "from transformers import AutoModel\n"
        "model, told = AutoModel.from_pretrained('nobody/tiny', output_loading_info=True)\n"
        "assert not told['missing_keys'] and not told['error_msgs']\n"
        "model = model.cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "while True:\n"
        "    model(torch.ones(2, 8, dtype=torch.long).cuda())[0].mean().backward()\n"
        "    optimizer.step()\n"
    )
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path / "mirror"))
    counted = BertModel(BertConfig(**sizes)).num_parameters()
    assert counted <= run(program(text))["parameters"] <= counted + 1024  # positions are a buffer
