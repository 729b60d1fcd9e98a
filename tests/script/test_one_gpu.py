"""Programs that ask for more than one GPU's memory of a steady step: right, or one sentence."""

import json
from pathlib import Path

import pytest

from tests.script import HEAD, LOOP, STEP, run
from tight_fit import plan_program
from tight_fit.command import script as command
from tight_fit.gpus import CONTEXT, find
from tight_fit.script import report
from tight_fit.script.program import Refused

GROWS = f"{HEAD}kept = []\nfor step in range(100):\n{STEP}    kept.append(KEPT)\n"
REFUSED = {
    "two GPUs": (
        LOOP.replace("for step", "other = nn.Linear(8, 8).to('cuda:1')\nfor step"),
        "train.py:6: the program uses cuda:1 beside cuda:0",
    ),
    "two GPUs of one data parallel": (
        LOOP.replace("for step", "model = nn.DataParallel(model, [0, 1])\nfor step"),
        "train.py:6: the program lays nn.DataParallel over 2 GPUs",
    ),
    "a CUDA graph": (
        LOOP.replace("for step", "graph = torch.cuda.CUDAGraph()\nfor step"),
        "train.py:6: the program records a CUDA graph",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_gpu_cannot_do_is_refused_with_what_to_do(name, program):
    text, said = REFUSED[name]
    with pytest.raises(Refused) as error:
        run(program(text))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("chosen", ["device = 'cuda:3'", "torch.cuda.set_device(3)"])
def test_any_one_gpu_may_be_chosen_by_its_number(chosen, program):
    text = LOOP.replace("model = ", f"{chosen}\nmodel = ", 1)
    same = f"{text}    assert loss.device == torch.device('cuda:3') and loss.get_device() == 3\n"
    assert run(program(same))["peak"] == run(program(LOOP))["peak"]


def test_data_parallel_with_one_gpu_is_its_module(program):
    facts = run(program(LOOP.replace("for step", "model = nn.DataParallel(model)\nfor step")))
    assert facts["peak"] == run(program(LOOP))["peak"]
    assert "train.py:6: nn.DataParallel is planned with one GPU" in facts["notes"][0]


def test_memory_that_each_step_keeps_is_said_with_its_line_and_its_end(program):
    """The kept tensor is 2,048 × 512 × 4 bytes; what is kept for one step only is no growth."""
    text = GROWS.replace("KEPT", "torch.zeros(2048, 512, device=device)")
    facts = run(program(text))
    assert facts["growth"] == {"bytes": 2048 * 512 * 4, "lines": ["train.py:12"]}
    room = facts["card_memory"] - facts["need"]
    steps = facts["regular"] + room // (2048 * 512 * 4)
    assert f"about {steps / 1000:.3g} k steps fit, and no more" in report.verdict(facts)[-1]
    once = text.replace("    kept.append", "    kept = []; kept.append")
    assert run(program(once))["growth"] is None
    assert run(program(GROWS.replace("KEPT", "loss.detach()")))["growth"] is None


def test_memory_that_grows_is_said_of_a_program_that_ends_with_its_loader(program):
    """What the end of the program frees is no part of its last step."""
    loop = "for rows in torch.utils.data.DataLoader(range(64), 8):"
    keeps = "    kept.append(torch.zeros(2048, 512, device=device))"
    text = f"{HEAD}kept = []\n{loop}\n{keeps}\n{STEP}"
    assert run(program(text))["growth"]["bytes"] == 2048 * 512 * 4


def test_a_part_of_the_memory_is_all_that_pytorch_gets(program):
    text = LOOP.replace("256", "8_000")
    limited = text.replace(
        "device =", "torch.cuda.set_per_process_memory_fraction(0.05); device =", 1
    )
    whole, part = run(program(text)), run(program(limited))
    assert whole["fits"] and not part["fits"] and whole["need"] == part["need"]
    assert part["card_memory"] == int(0.05 * find("T4").memory) + CONTEXT
    assert "train.py:3 lets PyTorch have 5% of the GPU" in report.verdict(part)[-1]


def test_free_memory_is_what_tensors_and_the_context_leave(program):
    gpu = find("T4")
    free = gpu.memory - CONTEXT - 4 * (256 * 256 + 256)
    asked = f"assert torch.cuda.mem_get_info() == ({free}, {gpu.memory})\nfor step"
    run(program(LOOP.replace("for step", asked)))


def test_a_notebook_is_told_apart_from_a_program(tmp_path, capsys):
    Path(tmp_path / "a.ipynb").write_text(json.dumps({"cells": []}))
    with pytest.raises(SystemExit):
        command.main([str(tmp_path / "a.ipynb"), "--gpu", "T4"])
    said = capsys.readouterr().err
    assert "%%plan" in said and "nbconvert" in said and said.count("\n") == 1


def test_a_batch_size_that_is_searched_is_said_to_be_the_first(program):
    """As accelerate's decorator does, and Trainer's auto_find_batch_size by it."""
    text = (
        f"{HEAD}from accelerate.utils import find_executable_batch_size\n"
        "@find_executable_batch_size(starting_batch_size=96)\n"
        "def train(batch_size):\n    for step in range(100):\n"
        "        loss = model(torch.rand(batch_size, 256, device=device)).square().mean()\n"
        "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
        "train()\n"
    )
    (note,) = plan_program(program(text), "T4").facts["notes"]
    assert note.startswith("train.py:7 searches its batch size") and "it tries, 96;" in note
