"""The script of lesson 25: ranks are lost, checkpoints read by others, and the losses stay."""

import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from helpers.parallel import REPORT, RankOutput, launch
from tests.attack import refused
from tests.forked import forked
from tests.lessons.cells import the_cell
from tests.parallel.test_launch import gone
from tests.small import ROOT
from tight_fit import gpus
from tight_fit.units import duration, size

SCRIPTS = ROOT / "scripts"
CLUSTER, BATCH = SCRIPTS / "cluster.py", SCRIPTS / "cluster.sbatch"
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")
CLOSE = 2e-4  # losses are printed to four digits; other ranks add up in another order


def run(*arguments, ranks=1):
    return forked(CLUSTER, *arguments, ranks=ranks)[0]


def launched(*arguments, ranks=1, **more):
    """By torchrun, which can start ranks again."""
    return launch(CLUSTER, *arguments, ranks=ranks, show=False, **more)[0]


def steps(printed):
    return [int(step) for step, _ in LOSS.findall(printed)]


def losses(printed):
    return {int(step): float(loss) for step, loss in LOSS.findall(printed)}


@pytest.fixture(scope="module")
def alone():
    """{step: loss} of one process that nothing happens to."""
    return losses(run("--steps", 8))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4, by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run("--folder", folder, "--every", 2, "--steps", 4, ranks=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4"]
    return folder


def test_a_checkpoint_has_the_bytes_that_the_lesson_takes_for_a_parameter(saved):
    """Lesson 25: weights and two optimizer states in fp32: how often to save follows."""
    names = {"math": math, "size": size, "duration": duration, "hours": 1}
    exec(the_cell("25", "def interval("), names)
    made = runpy.run_path(str(CLUSTER))["language_model"](32)
    parameters = sum(parameter.numel() for parameter in made.parameters())
    kept = FileSystemReader(saved / "step-4").read_metadata().state_dict_metadata.values()
    tensors = [one for one in kept if isinstance(one, TensorStorageMetadata)]
    held = sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors)
    assert held == pytest.approx(names["checkpoint"] / 8e9 * parameters, rel=0.001)


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


# -- losses ---------------------------------------------------------------------------------------


def test_a_lost_rank_costs_the_steps_since_the_last_checkpoint_and_no_loss(alone, tmp_path):
    """On two machines: both start anew, and meet again."""
    lost = ("--lose", 1, "--at", 6, "--steps", 8)
    printed = launched("--folder", tmp_path, "--every", 2, *lost, machines=2, restarts=1)
    assert steps(printed) == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert "2 ranks go on after step 4" in printed
    assert losses(printed) == pytest.approx(alone, abs=CLOSE)
    assert gone(str(tmp_path))


def test_another_number_of_ranks_goes_on_with_the_same_losses(copy, alone):
    printed = run("--folder", copy, "--steps", 8, ranks=3)
    assert steps(printed) == [5, 6, 7, 8]
    assert losses(printed) == pytest.approx({n: alone[n] for n in range(5, 9)}, abs=CLOSE)


def test_a_checkpoint_that_was_interrupted_is_passed_over(copy):
    (copy / "step-4" / ".metadata").unlink()
    assert steps(run("--folder", copy, "--steps", 3)) == [3]


# -- bad input ------------------------------------------------------------------------------------


def newest_file(folder):
    return max((folder / "step-4").glob("*.distcp"))


def cut(folder):
    file = newest_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def no_metadata(folder):
    (folder / "step-4" / ".metadata").write_bytes(b"nothing")


@pytest.mark.parametrize(
    "damage, arguments, reason",
    [
        (lambda folder: None, ("--width", 8), "Size mismatch"),
        (cut, (), "failed reading zip archive"),
        (lambda folder: newest_file(folder).unlink(), (), "No such file"),
        (no_metadata, (), "metadata"),
    ],
    ids=["another model", "cut", "missing", "metadata"],
)
def test_a_checkpoint_that_does_not_fit_ends_in_one_sentence(damage, arguments, reason, copy):
    damage(copy)
    with pytest.raises(RuntimeError) as caught:
        run("--folder", copy, "--steps", 5, *arguments)
    sentence = str(caught.value).strip().splitlines()[-1]
    assert sentence.startswith(f"{copy / 'step-4'} is damaged or of another model (")
    assert reason in sentence and sentence.endswith("): move it away.")


def test_numbers_that_cannot_be_are_refused():
    for arguments, says in (
        (("--every", 0), "--every, --batch-size and --width must be at least 1"),
        (("--batch-size", 9_999_999), "--batch-size 9999999 is more than the [0-9]+ examples"),
    ):
        with pytest.raises(RuntimeError, match=says):
            run(*arguments)
    for wrong, says in (
        ({"machines": 0}, "machines=0 must be at least 1"),
        ({"machines": 99}, "machines=99 must be at most 9"),
        ({"restarts": -1}, "restarts=-1 must be at least 0"),
    ):
        refused(ValueError, says, lambda wrong=wrong: launched(**wrong))


# -- its parts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts():
    return runpy.run_path(str(CLUSTER))


def test_an_epoch_has_each_example_once_and_the_next_another_order(parts):
    batches = [parts["batch_of"](step, 4, 21) for step in range(10)]
    first, second = torch.cat(batches[:5]), torch.cat(batches[5:])
    assert len(set(first.tolist())) == len(set(second.tolist())) == 20
    assert not torch.equal(first, second)
    assert torch.equal(parts["batch_of"](7, 4, 21), batches[7])


def test_the_newest_is_the_largest_number_that_is_whole(parts, tmp_path):
    assert parts["newest"](tmp_path) is None and parts["newest"](tmp_path / "none") is None
    for name in ("step-9", "step-10", "step-11-damaged", "step-100"):
        (tmp_path / name).mkdir()
        if name != "step-100":
            (tmp_path / name / ".metadata").touch()
    assert parts["newest"](tmp_path).name == "step-10"


def written(folder, attempt, rank, text, name="stdout"):
    file = folder / "run" / f"attempt_{attempt}" / str(rank) / f"{name}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_what_an_attempt_printed_is_kept_when_its_file_is_written_over(tmp_path, capsys):
    output = RankOutput([tmp_path], 1, show=True)
    for attempt, text in ((0, "a\n"), (0, "a\nb\n"), (0, ""), (0, "c\n"), (1, "d\n")):
        written(tmp_path, attempt, 0, text)
        output.read()
    assert output.texts == ["a\nb\nc\nd\n"]
    assert capsys.readouterr().out == "[0] a\n[0] b\n[0] c\n[0] d\n"


FAILED = (
    "Root Cause:\n[0]:\n  time  : now\n  rank  : {} (local_rank: 0)\n  exitcode  : {} (pid: 7)\n"
)
TRACE = "Traceback (most recent call last):\n"
MINE, LOST = f"{TRACE}ValueError: my own\n", f"{TRACE}Connection closed by peer\n"
BOTH, RESET = "Failures:\n" + FAILED, f"{TRACE}Connection reset\n"


@pytest.mark.parametrize(
    "reports, written_by, cause",
    [
        ([FAILED.format(0, 1), FAILED.format(1, 1)], {(0, 0): MINE, (1, 0): LOST}, (0, 1)),
        ([FAILED.format(0, 1), FAILED.format(1, 1)], {(0, 0): LOST, (1, 0): MINE}, (1, 1)),
        ([BOTH.format(1, -9) + FAILED.format(0, 1)], {(0, 0): RESET}, (1, -9)),
        ([BOTH.format(0, -15) + FAILED.format(1, 1)], {(0, 1): MINE}, (1, 1)),
    ],
    ids=["the first machine", "the second machine", "torchrun saw both", "torchrun ended one"],
)
def test_a_rank_that_lost_its_neighbour_or_was_ended_is_not_the_cause(
    reports, written_by, cause, tmp_path
):
    folders = [tmp_path / str(machine) for machine in range(len(reports))]
    for (machine, rank), text in written_by.items():
        written(folders[machine], 0, rank, text, "stderr")
    for folder, report in zip(folders, reports):
        folder.mkdir(exist_ok=True)
        (folder / REPORT).write_text(report)
    *found, wrote = RankOutput(folders, 2 // len(folders), show=False).failure()
    assert tuple(found) == cause
    assert wrote.endswith("ValueError: my own\n") == (cause[1] == 1)


def test_what_threads_write_after_the_traceback_is_not_its_error(tmp_path):
    trace = f"{TRACE}RuntimeError: the cause\n"
    after = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  []\n"
    written(tmp_path, 0, 0, f"before\n{trace}{after}", "stderr")
    written(tmp_path, 0, 1, after, "stderr")
    output = RankOutput([tmp_path], 2, show=False)
    assert output.errors(0).rstrip("\n") == trace.rstrip("\n") and output.errors(1) == after


def test_machines_share_the_gpus_or_have_none():
    for given, shares in (("4,5,6,7,8", ["4,5", "6,7"]), ("0,1,2", ["", ""]), ("", ["", ""])):
        seen = []
        for machine in range(2):
            variables = {gpus.VISIBLE: given}
            gpus.give_share(variables, machine, 2, 2)
            seen.append(variables[gpus.VISIBLE])
        assert seen == shares


# -- Slurm ----------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
[ "$1 $2" = "--cpus-per-task 8" ] || exit 1
shift 2
for machine in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & done
wait
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames 127.0.0.[1-2]" ] && echo 127.0.0.1
[ "$1" = requeue ] && echo "requeued $2"
exit 0
"""
TORCHRUN = '#!/bin/bash\nexec {} -m torch.distributed.run --local-addr 127.0.0.1 "$@"\n'


def free_port():
    """One of those that the file chooses from: 20000 + job ID % 10000."""
    for port in range(20_000 + os.getpid() % 9000, 30_000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job on two machines, with programs in the place of Slurm's that start
    everything on this machine. Returns it with the job's number."""
    programs = {"srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN.format(sys.executable)}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = str(70_000 + free_port() - 20_000)
    return job, os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": job,
        "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "8", "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip


def test_before_its_time_is_over_a_job_saves_and_goes_back_into_the_queue(slurm, tmp_path):
    """Slurm's signal comes in mid-training; no save was due. The next start goes on from there."""
    job, environment = slurm
    command = ["bash", BATCH, "--every", "1000000"]
    log, where = tmp_path / "log", {"cwd": ROOT, "env": environment}
    with log.open("w") as written:
        running = subprocess.Popen([*command, "--steps", "1000000"], stdout=written, **where)
    try:
        for _ in range(600):
            if "step 3:" in log.read_text():
                break
            time.sleep(0.2)
        else:
            raise TimeoutError(f"Step 3 was not printed: {log.read_text()}")
        running.send_signal(signal.SIGUSR1)
        assert running.wait(timeout=120) == 0
    finally:
        running.kill()
        (tmp_path / "checkpoints" / "stop").touch()  # ranks that a failed test leaves end by it
    first = log.read_text()
    assert first.splitlines()[-1] == f"requeued {job}"
    last = max(steps(first))
    saved = [path.parent.name for path in tmp_path.glob("checkpoints/*/.metadata")]
    assert saved == [f"step-{last}"]
    command += ["--steps", str(last + 1)]
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, **where)
    assert steps(again.stdout) == [last + 1] and "requeued" not in again.stdout
    assert gone(str(tmp_path))


def test_the_batch_file_waits_less_than_the_time_that_it_is_told_before_the_end():
    text = BATCH.read_text()
    told = int(re.search(r"--signal=B:USR1@(\d+)", text)[1])
    assert int(re.search(r"\{1\.\.(\d+)\}", text)[1]) <= told - 60
