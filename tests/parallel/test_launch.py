"""Ranks from a notebook: their output, their failures, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from helpers import parallel
from helpers.parallel import RankFailed, environment, failures, launch
from tests.small import ROOT
from tight_fit import gpus


def script(folder: Path, body: str) -> Path:
    path = folder / "ranks.py"
    path.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{body}")
    return path


def processes(marker: str) -> list[int]:
    """Processes whose command line holds the marker."""
    own = psutil.process_iter(["pid", "cmdline", "status"])
    running = [one.info for one in own if one.info["status"] != psutil.STATUS_ZOMBIE]
    with_it = [one["pid"] for one in running if marker in " ".join(one["cmdline"] or [])]
    return [pid for pid in with_it if pid != os.getpid()]


def gone(marker: str) -> bool:
    """Waited for as long as a busy machine may take to end what was told to end."""
    for _ in range(1200):
        if not processes(marker):
            return True
        time.sleep(0.1)
    return False


TALKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(rank + 1)])
dist.all_reduce(value)
print(f"rank {rank} of {os.environ['WORLD_SIZE']} has {value.item()} {sys.argv[1]}")
print("port", os.environ["MASTER_PORT"])
dist.destroy_process_group()
"""


def test_each_rank_knows_who_it_is_and_can_talk(tmp_path, capsys):
    """Also where torchrun's usual port is taken, and two launches run at once."""
    path = script(tmp_path, TALKS)
    with socket.socket() as taken, ThreadPoolExecutor(2) as pool:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else has it: as good
        both = list(pool.map(lambda _: launch(path, "seven", ranks=2), range(2)))
    ports = {text.split()[-1] for texts in both for text in texts}
    assert len(ports) == 2 and "29500" not in ports
    said = [f"rank {rank} of 2 has 3.0 seven" for rank in range(2)]
    assert [[text.splitlines()[0] for text in texts] for texts in both] == [said] * 2
    shown = [line for line in capsys.readouterr().out.splitlines() if "port" not in line]
    assert sorted(shown) == sorted(2 * [f"[{rank}] {line}" for rank, line in enumerate(said)])
    assert gone(str(path))


@pytest.mark.parametrize(
    "fails, code, says",
    [
        ("raise ValueError('I am unhappy')", 1, "failed with exit code 1"),
        ("os.kill(os.getpid(), 9)", -9, "was killed by signal 9 .SIGKILL."),
    ],
)
def test_a_failing_rank_is_named(fails, code, says, tmp_path):
    path = script(
        tmp_path, f"def train():\n    {fails}\nif rank == 1:\n    train()\ntime.sleep(600)"
    )
    with pytest.raises(RankFailed, match=f"Rank 1 of 2 {says}") as caught:
        launch(path, ranks=2, show=False)
    assert caught.value.rank == 1 and caught.value.exitcode == code
    if code == 1:
        assert "in train" in caught.value.traceback and "I am unhappy" in str(caught.value)
    assert gone(str(path))


def test_ranks_that_hang_are_stopped_though_they_ignore_being_told_to_end(tmp_path, monkeypatch):
    """The launcher's clock jumps by an hour when both ranks say that they wait, and not before."""
    clock = time.monotonic

    def now():
        waiting = all((tmp_path / f"waits-{rank}").exists() for rank in range(2))
        return clock() + 3600 * waiting

    monkeypatch.setattr(parallel, "_now", now)
    monkeypatch.setattr(parallel, "GRACE", 0.5)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    waits = f"print('waiting', flush=True)\nopen(f'{tmp_path}/waits-{{rank}}', 'w')\n"
    path = script(tmp_path, f"{deaf}{waits}time.sleep(600)")
    with pytest.raises(TimeoutError, match="not done after 1000 seconds.*rank 0: waiting"):
        launch(path, ranks=2, timeout=1000, show=False)
    assert not processes(str(path))


def test_ranks_may_take_minutes_on_a_busy_machine(tmp_path, monkeypatch):
    """Nobody hangs where each has 6 seconds to compute and a fiftieth of a core."""
    seconds = iter([0.0])
    monkeypatch.setattr(parallel, "_now", lambda: next(seconds, 400.0))
    assert launch(script(tmp_path, 'print("done")'), ranks=2, show=False) == ["done\n"] * 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_nothing_is_left_when_the_notebooks_process_ends(tmp_path, how):
    if how == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent died")
    path = script(tmp_path, f"open(r'{tmp_path}/' + str(rank), 'w')\ntime.sleep(600)")
    # What runs in the background does not listen to SIGINT by itself.
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listens}; from helpers.parallel import launch; launch(r'{path}')"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(how)
    errors = parent.communicate(timeout=60)[1]
    assert how == signal.SIGKILL or b"KeyboardInterrupt" in errors
    assert gone(str(path))


@pytest.mark.parametrize("seen", [None, "0,1"])
def test_the_ranks_see_the_gpus_that_the_notebook_hid_from_itself(seen, monkeypatch, tmp_path):
    for name in ("0000:04", "0000:05"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setenv(gpus.BEFORE, "")
    monkeypatch.delenv(gpus.BEFORE)
    monkeypatch.setenv(gpus.VISIBLE, seen or "")
    if seen is None:
        monkeypatch.delenv(gpus.VISIBLE)
    assert environment(None).get(gpus.VISIBLE) == seen, "nothing is hidden yet"
    assert gpus.hide_all_but_first() == 2 and os.environ[gpus.VISIBLE] == "0"
    assert environment(None).get(gpus.VISIBLE) == seen


def test_a_report_without_ranks_names_none():
    assert failures("error: unrecognized arguments") == []
