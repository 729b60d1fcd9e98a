"""Ranks: processes that try to outlive the launch."""

import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from helpers import keeper
from helpers.parallel import RankFailed, launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

# -- processes that try to stay. Each writes its id into the file that it gets.

STAYS = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
CHILD = f"""
import os, signal, subprocess, sys, time
stays, file = {STAYS!r}, sys.argv[1]
def start(**more):
    subprocess.Popen([sys.executable, "-c", stays, file], **more)
def wait():
    while not (os.path.exists(file) and open(file).read()):
        time.sleep(0.01)
"""
WAYS = {
    "a child": "start()",
    "in a session of its own": "start(start_new_session=True)",
    "without its parent's environment": "start(start_new_session=True, env={})",
    "an orphan": """
        if os.fork() == 0:
            start(start_new_session=True)
            os._exit(0)
    """,
    "a daemon, forked twice": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", stays, file])
            os._exit(0)
    """,
    "deaf to every signal but one": """
        stays = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)];" + stays
        start(start_new_session=True)
    """,
}
ENDS = {
    "it ends": "",
    "it fails": "raise SystemExit(3)",
    "it is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


def stopped(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def body(way, end):
    return CHILD + textwrap.dedent(WAYS[way]) + "\nwait()\n" + end + "\n"


def command(folder, text):
    """The keeper alone, which is what launch starts, with a rank: no torchrun, so it is quick."""
    (folder / "rank.py").write_text(text)
    return [
        sys.executable,
        keeper.__file__,
        "5",
        sys.executable,
        folder / "rank.py",
        folder / "pid",
    ]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("way", WAYS)
def test_no_process_outlives_the_command(way, end, tmp_path):
    code = subprocess.run(command(tmp_path, body(way, end))).returncode
    assert code == {"": 0, "raise SystemExit(3)": 3}.get(end, -9)
    assert stopped(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("way", list(WAYS)[1::2])
def test_no_process_outlives_a_command_that_is_told_to_end(way, tmp_path):
    running = subprocess.Popen(command(tmp_path, body(way, "time.sleep(600)")))
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        time.sleep(0.05)
    running.terminate()
    assert running.wait() == -15
    assert stopped(int((tmp_path / "pid").read_text()))


def test_no_process_of_a_rank_outlives_the_launch(tmp_path):
    fails = "if os.environ['RANK'] == '1':\n    raise SystemExit(3)\ntime.sleep(600)"
    text = body("a daemon, forked twice", fails)
    own = text.replace(", sys.argv[1]\n", ", sys.argv[1] + os.environ['RANK']\n", 1)
    assert own != text
    (tmp_path / "rank.py").write_text(own)
    with pytest.raises(RankFailed):
        launch(tmp_path / "rank.py", tmp_path / "pid", ranks=2, show=False)
    assert all(stopped(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))
