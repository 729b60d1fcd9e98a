"""Ranks from a notebook: their output, their failures, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from helpers import parallel
from helpers.parallel import RankFailed, environment, failures, launch
from tight_fit import gpus

HERE = Path(__file__).parents[2]


def script(folder: Path, body: str) -> Path:
    path = folder / "ranks.py"
    path.write_text(
        "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(body)
    )
    return path


def processes(marker: str) -> list[int]:
    """Processes whose command line holds the marker."""
    pids = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if (
            marker in " ".join(process.info["cmdline"] or [])
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            pids.append(process.info["pid"])
    return [pid for pid in pids if pid != os.getpid()]


def gone(marker: str) -> bool:
    """Waited for as long as a busy machine may take to end what was told to end."""
    for _ in range(1200):
        if not processes(marker):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """The launcher's clock jumps by an hour when both ranks say that they wait, and not before."""
    real = time.monotonic

    def now():
        waiting = all((tmp_path / f"waits-{rank}").exists() for rank in range(2))
        return real() + 3600 * waiting

    monkeypatch.setattr(parallel, "_now", now)
    return "print('waiting', flush=True)\nopen(f'{folder}/waits-{rank}', 'w')\ntime.sleep(600)"


def test_each_rank_knows_who_it_is_and_can_talk(tmp_path, capsys):
    path = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from helpers.recipe import Recipe
        dist.init_process_group("gloo")
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value)
        print(f"rank {rank} of {os.environ['WORLD_SIZE']} has {value.item()} {sys.argv[1]}")
        dist.destroy_process_group()
        """,
    )
    texts = launch(path, "seven", ranks=3)
    assert texts == [f"rank {rank} of 3 has 6.0 seven\n" for rank in range(3)]
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == [f"[{rank}] rank {rank} of 3 has 6.0 seven" for rank in range(3)]
    assert gone(str(path))


def test_a_failing_rank_is_named_with_its_traceback(tmp_path):
    path = script(
        tmp_path,
        """
        def train():
            raise ValueError("rank one is unhappy")
        if rank == 1:
            train()
        time.sleep(600)
        """,
    )
    with pytest.raises(
        RankFailed, match="(?s)Rank 1 of 2 failed with exit code 1.*rank one is unhappy"
    ) as caught:
        launch(path, ranks=2, show=False)
    assert caught.value.rank == 1 and "in train" in caught.value.traceback
    assert gone(str(path))


def test_a_port_in_use_is_no_error(tmp_path):
    """torchrun's usual port is taken, and two launches run at once: each finds a free one."""
    path = script(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("port", os.environ["MASTER_PORT"])
        dist.destroy_process_group()
    """,
    )
    with socket.socket() as taken, ThreadPoolExecutor(2) as pool:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else has it: as good
        both = list(pool.map(lambda _: launch(path, ranks=2, show=False), range(2)))
    ports = [texts[0].split()[-1] for texts in both]
    assert "29500" not in ports and ports[0] != ports[1]
    assert all(texts[0] == texts[1] for texts in both)


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    path = script(
        tmp_path,
        """
        if rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(600)
        """,
    )
    with pytest.raises(RankFailed, match="Rank 1 of 2 was killed by signal 9 .SIGKILL.") as caught:
        launch(path, ranks=2, show=False)
    assert caught.value.exitcode == -9 and gone(str(path))


def test_ranks_that_hang_are_stopped(tmp_path, hanging):
    path = script(tmp_path, f"folder = {str(tmp_path)!r}\n{hanging}")
    with pytest.raises(TimeoutError, match="not done after 1000 seconds.*rank 0: waiting"):
        launch(path, ranks=2, timeout=1000, show=False)
    assert not processes(str(path))


def test_ranks_may_take_minutes_on_a_busy_machine(tmp_path, monkeypatch):
    """Nobody hangs where each has 6 seconds to compute and a fiftieth of a core."""
    seconds = iter([0.0])
    monkeypatch.setattr(parallel, "_now", lambda: next(seconds, 400.0))
    assert launch(script(tmp_path, 'print("done")'), ranks=2, show=False) == ["done\n"] * 2


def test_ranks_that_ignore_being_told_to_end_are_ended(tmp_path, monkeypatch, hanging):
    monkeypatch.setattr(parallel, "GRACE", 0.5)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    path = script(tmp_path, f"folder = {str(tmp_path)!r}\n{deaf}{hanging}")
    with pytest.raises(TimeoutError):
        launch(path, ranks=2, timeout=1000, show=False)
    assert not processes(str(path))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_nothing_is_left_when_the_notebooks_process_ends(tmp_path, how):
    if how == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent died")
    path = script(tmp_path, f"open(r'{tmp_path}/' + str(rank), 'w')\ntime.sleep(600)")
    # What runs in the background does not listen to SIGINT by itself.
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{listens}; from helpers.parallel import launch; launch(r'{path}')",
        ],
        cwd=HERE,
        stderr=subprocess.PIPE,
    )
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(how)
    errors = parent.communicate(timeout=60)[1]
    assert how == signal.SIGKILL or b"KeyboardInterrupt" in errors
    assert gone(str(path))


@pytest.mark.parametrize("given, seen", [(None, None), ("0,1", "0,1")])
def test_the_ranks_see_the_gpus_that_the_notebook_hid_from_itself(
    given, seen, monkeypatch, tmp_path
):
    for name in ("0000:04", "0000:05"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setenv(gpus.BEFORE, "")
    monkeypatch.delenv(gpus.BEFORE)
    monkeypatch.setenv(gpus.VISIBLE, given or "")
    if given is None:
        monkeypatch.delenv(gpus.VISIBLE)
    assert gpus.hide_all_but_first() == 2 and os.environ[gpus.VISIBLE] == "0"
    assert environment(None).get(gpus.VISIBLE) == seen


def test_ranks_see_what_their_notebook_sees_where_nothing_was_hidden(monkeypatch):
    monkeypatch.delenv(gpus.BEFORE, raising=False)
    monkeypatch.setenv(gpus.VISIBLE, "0")
    assert environment(None)[gpus.VISIBLE] == "0"


def test_a_report_without_ranks_names_none():
    assert failures("error: unrecognized arguments") == []
