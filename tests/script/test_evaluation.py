"""The evaluation of a program is planned with its training: against runs on real tensors."""

from pathlib import Path

import pytest

from benchmarks.programs.real import steps_of
from tests.script import HEAD, LOOP, run
from tight_fit.script import program_report

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 8  # of an epoch of both programs
NUMBERS = 64  # bytes of the numbers of which a CPU makes tensors
LOADS = f"""\
{HEAD}
from torch.utils.data import DataLoader
for epoch in range(1):
    for x in DataLoader(torch.rand(64, 256), batch_size=8):
        model(x.to(device)).square().mean().backward()
"""


def arguments_of(name, tiny, *more):
    return ((str(tiny / "bert"),) if name.endswith("trainer") else ()) + more


@pytest.mark.parametrize("name", ["evaluation_loop", "evaluation_trainer"])
def test_an_evaluation_takes_what_the_real_one_takes(name, tiny, tmp_path, monkeypatch):
    """Of what lies between the last step of an epoch and the first of the next, to the byte."""
    monkeypatch.chdir(tmp_path)
    path, arguments = str(PROGRAMS / f"{name}.py"), arguments_of(name, tiny)
    facts = run(path, *arguments, gpu=None, seconds=300.0)
    evaluation = facts["evaluation"]
    plan = evaluation["peak"] - evaluation["begin"]
    real = steps_of(Path(path), arguments, STEPS + 1, tmp_path)
    assert 0 <= real[STEPS] - plan <= NUMBERS, (real, plan)
    assert plan > 1.5 * real[STEPS - 1], "the evaluation does not stand out"


def test_the_answer_has_a_line_on_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = run(str(PROGRAMS / "evaluation_loop.py"), gpu="RTX 3060")
    assert facts["peak_phase"] == "evaluation" and facts["peak"] == facts["evaluation"]["peak"]
    (line,) = [line for line in program_report.verdict(facts) if line.startswith("Its evaluation")]
    assert "from evaluation_loop.py:15 on" in line and facts["evaluation"]["calls"] == 16


def test_logits_that_leave_the_gpu_are_not_kept_there(tiny, tmp_path, monkeypatch):
    """What eval_accumulation_steps=1 is for: of ten batches one at a time is on the GPU."""
    monkeypatch.chdir(tmp_path)
    path = str(PROGRAMS / "evaluation_trainer.py")
    kept = run(path, *arguments_of(path[:-3], tiny, "4"), gpu="T4")
    moved = run(path, *arguments_of(path[:-3], tiny, "4", "1"), gpu="T4")
    logits = 4 * 64 * 8192 * 4  # of one batch, bytes
    assert kept["evaluation"]["peak"] - moved["evaluation"]["peak"] > 15 * logits
    changed = run(path, *arguments_of(path[:-3], tiny, "4"), change={"evaluation": 1})
    assert changed["evaluation"]["peak"] == moved["evaluation"]["peak"]
    assert changed["found"]["took"] == ["evaluation"]


def test_equal_batches_before_the_first_step_are_computed_twice(program, monkeypatch):
    """A thousand batches; the peak is that of one, which holds its hidden layer and its result."""
    ran = "model.register_forward_hook(lambda *given: print('ran', flush=True))\n"
    first = (
        "model.eval()\nwith torch.no_grad():\n    for _ in range(1000):\n        losses = model("
    )
    text = f"{HEAD}{ran}{first}torch.rand(512, 256, device=device)).mean().item()\nmodel.train()\n"
    facts = run(program(text + LOOP.removeprefix(HEAD)))
    assert facts["evaluation"]["calls"] == 1000
    weights = 4 * (256 * 256 + 256)
    assert facts["evaluation"]["peak"] == weights + 2 * 512 * 256 * 4


def test_a_result_that_is_kept_is_counted_each_time(program):
    """Also where the model was not run: 50 results beside the weights, then twice, joined."""
    first = "model.eval()\nkept = []\nwith torch.no_grad():\n    for _ in range(50):\n        "
    text = f"{HEAD}{first}kept.append(model(torch.rand(512, 256, device=device)))\n"
    text += "    kept = torch.cat(kept)\nmodel.train()\n" + LOOP.removeprefix(HEAD)
    facts = run(program(text))
    assert facts["evaluation"]["peak"] == 4 * (256 * 256 + 256) + 100 * 512 * 256 * 4


def test_an_evaluation_that_is_not_reached_is_named(program):
    seldom = "    if step % 1000 == 999:\n        model.eval()\n        model.train()\n"
    facts = run(program(LOOP + seldom))
    assert "Its evaluation (train.py:12) is not planned." in program_report.verdict(facts)
    assert not any("evaluation" in line for line in program_report.verdict(run(program(LOOP))))


def test_an_evaluation_that_cannot_be_planned_leaves_the_plan_of_the_training(program):
    text = (
        f"{LOADS}        optimizer.step()\n        optimizer.zero_grad()\n"
        "    model.eval()\n    with torch.no_grad():\n        y = model(x.to(device))\n"
        "    y[y > 0].tolist()[3]\n    model.train()\n"
    )
    facts = run(program(text))
    assert facts["fits"] and facts["evaluation"]["calls"] == 1
    assert "train.py:16" in facts["evaluation"]["stopped"]
    assert any("train.py:16: " in line for line in program_report.verdict(facts))


def test_an_evaluation_without_eval_is_one_once_training_is_planned(program):
    """Who forgets `model.eval()` evaluates all the same: four results of 64 examples are kept."""
    text = (
        f"{LOADS}        optimizer.step()\n        optimizer.zero_grad()\n"
        "kept = []\nwith torch.no_grad():\n    for x in DataLoader(torch.rand(256, 256), 64):\n"
        "        kept.append(model(x.to(device)))\n"
    )
    evaluation = run(program(text))["evaluation"]
    assert evaluation["calls"] == 4 and evaluation["line"] == "train.py:16"
    weights_and_states = 3 * 4 * (256 * 256 + 256)
    assert evaluation["peak"] >= weights_and_states + 4 * 64 * 256 * 4
