"""A pretended GPU behaves as a real one, and what runs on it can never become a record.

The checks on the GPU itself are in on_a_pretended_gpu.py and ranks_on_pretended_gpus.py, as they
need processes that start with it.
"""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from benchmarks import gpu_layouts, proof
from benchmarks.measured_steps import every_case
from helpers import record
from helpers.recipe import Recipe, difference
from tests.benchmarks.test_measured_steps import a_step
from tests.script.test_magic import said_after_a_plan
from tests.small import ROOT, notebook, python
from tight_fit.gpus import REHEARSAL, VISIBLE
from tight_fit.units import MIB
from tools.course import records, session
from tools.course.notebooks import chosen
from tools.pretend import build, cards, mirror, narrow, rehearse, true_size

HERE = Path(__file__).parent
LINES = (HERE / "on_a_pretended_gpu.py").read_text(encoding="utf8").splitlines()
CHECKS = [
    line.removeprefix("def ").partition("(")[0]
    for before, line in zip(LINES, LINES[1:])
    if before == "@check"
]


@pytest.fixture(scope="module")
def compiled():
    """The library; where it cannot be, a test that needs it is left out in a sentence."""
    try:
        build.library()
    except build.CannotCompile as error:
        pytest.skip(str(error))


needs_the_library = pytest.mark.usefixtures("compiled")


def variables(card, count=1):
    return {**os.environ, **rehearse.environment(card, count)}


@cache
def answers(card):
    script = str(HERE / "on_a_pretended_gpu.py")
    done = python(script, env=variables(card), cwd=None)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.night
@needs_the_library
@pytest.mark.parametrize("card", ["T4", "A100"])
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_pretended_gpu(card, check):
    assert not answers(card)[check], answers(card)[check]


def ranks_of(script, *arguments, gpus, ranks=2):
    """What torchrun's ranks of a script print on a machine with so many pretended T4s."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = python("-m", *launch, str(script), *arguments, env=variables("T4", gpus), cwd=None)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.night
@needs_the_library
def test_ranks_exchange_messages_over_nccl():
    """And two ranks that both send first are told that NCCL would wait for ever."""
    said = ranks_of(HERE / "ranks_on_pretended_gpus.py", gpus=2)
    assert said.count("both sent first: refused") >= 1


@pytest.mark.night
@needs_the_library
@pytest.mark.parametrize("stages", [2, 3])
def test_every_rank_of_several_pipelines_hears_every_other(stages):
    """The communicators of each pair have one name on both of its ranks, whatever others made."""
    script = HERE / "pipelines_on_pretended_gpus.py"
    said = ranks_of(script, str(stages), gpus=6, ranks=6)
    assert said.count(f"heard of {stages - 1} others") == 6


@pytest.mark.night
@needs_the_library
def test_a_broken_branch_for_gpus_is_caught(tmp_path):
    """The branch has a name that does not exist; on a machine without a GPU nothing shows it."""
    gpu_branch = (
        "import torch\n"
        "runs = {}\n"
        "if torch.cuda.is_available():\n"
        "    fastest = min(rnus, key=runs.get)\n"
        "print('done')"
    )
    path = notebook(tmp_path, "x = 1", gpu_branch, "print(x)")
    plain = python("-c", gpu_branch, cwd=None)
    assert plain.stdout == "done\n"
    found = rehearse.rehearse(path, "T4", 1)
    assert (found.cells, found.ran) == (3, 2) and list(found.failed) == ["2"]
    assert "NameError: name 'rnus' is not defined" in found.failed["2"]


@pytest.mark.night
@needs_the_library
@pytest.mark.parametrize("card", ["T4", "RTX4060"])
def test_a_lesson_runs_on_a_pretended_gpu(card):
    """With full models, and with mini ones where the GPU is too small for them.

    One lesson of all: `python -m tools.pretend` runs every notebook.
    """
    (path,) = chosen(["00"])
    found = rehearse.rehearse(path, card, 1)
    assert found.ran == found.cells >= 15 and not found.failed


TOO_LARGE = """
import torch
from helpers import models, profile, record, train
from tight_fit.techniques.optimizers import make_optimizer
from helpers.plan import OutOfMemory
from helpers.recipe import replace
from tight_fit.techniques.step import train_step
large = profile.recipe("deberta-large", batch_size=16, steps=1)

def own_loop(recipe):
    model = models.build(recipe).to("cuda")
    optimizer = make_optimizer(model, recipe)
    batch = train.encoded(recipe)["train"].batch(range(4))
    batch = {name: value.to("cuda") for name, value in batch.items()}
    train_step(model, optimizer, [batch], 4, recipe)

for work, error, words in (
    (own_loop, torch.OutOfMemoryError, "At its true size"),
    (train.fit, torch.OutOfMemoryError, "At its true size"),
    (record.run, OutOfMemory, "9.01 GiB more than the 14.56 GiB of Tesla T4"),
):
    try:
        work(large)
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError("a step of 23.6 GiB ran on a T4")
own_loop(replace(large, batch_size=4))
train.fit(replace(large, batch_size=4), progress=False)
"""


@pytest.mark.night
@needs_the_library
def test_what_has_no_room_at_its_true_size_does_not_run_narrow_either(tmp_path):
    """DeBERTa-v3-large, 16 x 256 tokens in fp32, on a T4; a quarter of the batch fits."""
    found = rehearse.rehearse(notebook(tmp_path, TOO_LARGE), "T4", 1)
    assert found.ran == 1 and not found.failed


AFTER_THE_GPU = """
import torch
from IPython import get_ipython
from IPython.utils.capture import capture_output
get_ipython().run_line_magic("load_ext", "tight_fit")
torch.ones(1, device=DEVICE, requires_grad=True).sum().backward()
with capture_output() as seen:
    get_ipython().run_cell_magic("plan", "--gpu T4", "model = torch.nn.Linear(2, 2).to('cuda')")
assert "!tight-fit script train.py" in seen.stdout, seen.stdout
"""


@pytest.mark.night
@needs_the_library
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_kernel_that_has_used_its_gpu_says_that_it_cannot_be_copied(tmp_path, device):
    """Autograd's threads, which it has where there is a GPU, are in no copy of the process."""
    cell = AFTER_THE_GPU.replace("DEVICE", repr(device))
    found = rehearse.rehearse(notebook(tmp_path, cell), "T4", 1)
    assert found.ran == 1 and not found.failed


@needs_the_library
def test_a_plan_of_a_recipe_lets_a_kernel_without_a_gpu_be_copied():
    """As with PyTorch's build for CUDA and no GPU: one pretended GPU, which is hidden."""
    hidden = rehearse.environment("T4", 1) | {VISIBLE: ""}
    assert "YES, it fits on a T4" in said_after_a_plan(hidden)


HOOKED = """
import importlib.util, sitecustomize
for name in sitecustomize.CHANGED:
    if name.startswith("helpers."):
        assert "exec_module" in vars(importlib.util.find_spec(name).loader), name
"""


def test_the_course_changes_where_a_gpu_is_pretended():
    """`helpers` puts a finder of its own first. A plan that nothing changes is kept for a model at
    its true size and for the narrow one alike."""
    asked = {REHEARSAL: "T4:1", "PYTHONPATH": f"{rehearse.STARTUP}{os.pathsep}{ROOT}"}
    done = python("-c", HOOKED, env={**os.environ, **asked})
    assert done.returncode == 0, done.stderr


PROGRAM = """
import torch
model = torch.nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.ones(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.night
@needs_the_library
def test_a_program_is_planned_on_a_machine_with_a_gpu(tmp_path):
    """Whose GPUs the command hides from itself, so that a copy of it can compute gradients."""
    (tmp_path / "train.py").write_text(PROGRAM)
    asked = ("-m", "tight_fit", "script", tmp_path / "train.py", "--gpu", "T4")
    done = python(*asked, env=variables("A100"))
    assert done.returncode == 0 and "YES, it fits on a T4" in done.stdout, done.stderr


def test_each_excuse_is_of_one_cell():
    for name, excuses in rehearse.EXCUSED.items():
        (path,) = chosen([name])
        sources = [cell.source for cell in nbformat.read(path, as_version=4).cells]
        for words in excuses:
            assert sum(words in text for text in sources) == 1, words


RUN = """
from helpers import profile, record
print(record.run(profile.recipe("vit", steps=2), "00_start_here/after").environment["rehearsal"])
"""


@pytest.mark.night
@needs_the_library
def test_what_it_writes_is_marked_and_refused_everywhere(tmp_path, capsys):
    done = python("-c", RUN, env=variables("A100") | {record.RUNS: str(tmp_path)})
    assert done.stdout.splitlines()[-1] == "A100:1", done.stderr
    (path,) = tmp_path.glob("*.json")
    assert records.read_file(path).environment["name"] == "NVIDIA A100-SXM4-40GB"
    assert records.read_all(tmp_path) == []  # what notebooks show
    assert "of a rehearsal on a pretended GPU" in capsys.readouterr().err
    with pytest.raises(ValueError, match="of a rehearsal on a pretended GPU"):
        session.keep(tmp_path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_steps_of_a_rehearsal_are_refused(tmp_path, monkeypatch):
    machine = {"device": "cpu", "name": "x86_64", "rehearsal": "T4:1"}
    pretended = proof.Proof(machine, "", "", [a_step()])
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    for finished in (True, False):
        with pytest.raises(ValueError, match="rehearsal on a pretended GPU"):
            proof.write(pretended, tmp_path / "results" / "steps", finished)
    assert not (tmp_path / "results").exists()
    assert proof.write(pretended, tmp_path / "elsewhere").exists()


def test_no_record_is_of_a_rehearsal():
    texts = [path.read_text("utf8") for path in record.RESULTS.rglob("*.json")]
    assert texts and not any(re.search(r'"rehearsal": (?!false)', text) for text in texts)


@pytest.mark.night
@needs_the_library
@pytest.mark.parametrize(
    "model, technique, gpus",
    [
        ("ViT-B/16, 32 images", "mixed precision, fp16", 1),
        (gpu_layouts.MODEL, "pipeline (1F1B, 4 micro-batches) on 2 GPUs", 2),
    ],
)
def test_a_step_of_make_record_is_what_its_plan_says(model, technique, gpus):
    """The processes that GPUs will run: the plan, PyTorch's own code for GPUs, CUDA's figures."""
    step = proof.Step.from_dict(answer_of_a_step(model, technique, gpus))
    assert abs(step.miss) < 0.02  # the CPU's attention keeps other rows than CUDA's
    # A small segment; of a narrow decoder's stages half a large one.
    assert abs(step.planned_reserved - step.reserved) <= (2 if gpus == 1 else 10) * MIB
    assert step.allocated < 72 * MIB  # of a narrow model
    assert step.seconds > 0 and step.planned_seconds > 0 and bool(step.link) == (gpus == 2)


def answer_of_a_step(model, technique, gpus):
    """What the process of one step of `make record` prints, on a machine with so many T4s."""
    (case,) = [case for case in every_case(2) if case[:2] == (model, technique)]
    changes = {name: new for name, (_, new) in difference(Recipe(), case[-1]).items()}
    asked = json.dumps({"model": model, "technique": technique, "recipe": changes})
    done = python("-m", "benchmarks.measured_steps", "--one", asked, env=variables("T4", gpus))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("text", ["P100", "T4:0", "T4:x", "T4:99", ":2"])
def test_an_unknown_card_is_refused_in_a_sentence(monkeypatch, text):
    monkeypatch.setenv(REHEARSAL, text)
    with pytest.raises(ValueError, match="use T4, A100, RTX4060"):
        cards.asked()


def test_without_a_compiler_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.CannotCompile, match=r"No C\+\+ compiler is here"):
        build.library()


def test_processes_side_by_side_take_one_mirror(tmp_path, monkeypatch):
    """A second one made at the same time took the first from those who were reading it."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(mirror, "FOLDER", tmp_path / "mirror")
    both, made = threading.Barrier(2), []

    def make(place):
        made.append(place)
        with suppress(threading.BrokenBarrierError):
            both.wait(1)  # for the other one, who makes a mirror too unless it waits
        place.mkdir(exist_ok=True)

    monkeypatch.setattr(mirror, "make", make)
    with ThreadPoolExecutor(2) as pool:  # each opens the lock for itself, as a process does
        found = list(pool.map(lambda _: mirror.folder(), range(2)))
    assert len(made) == 1 and set(found) == {tmp_path / "mirror"}
    assert (tmp_path / "mirror" / "version").read_text() == mirror.VERSION


def test_needs_are_written_by_one_process_at_a_time(tmp_path, monkeypatch):
    """Of two that replaced one file at the same time, one found it gone and ended its step."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(true_size, "FOLDER", tmp_path / "needs")
    planned = SimpleNamespace(peak=3, overhead=4)
    monkeypatch.setattr(narrow, "outside", lambda plan: lambda *given: planned)
    write, both, together = true_size.replace_all, threading.Barrier(2), []

    def replace_all(folder, texts):
        with suppress(threading.BrokenBarrierError):
            both.wait(1)
            together.append(texts)
        write(folder, texts)

    monkeypatch.setattr(true_size, "replace_all", replace_all)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(true_size.need.__wrapped__, [Recipe()] * 2))
    assert found == [(3, 4)] * 2 and not together
