"""A JupyterLab that `make lab` starts in a copy of the course."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import matplotlib
import psutil

from tests.small import ROOT

TOKEN = "of-this-test"
BUILT = (".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis", ".ipynb_checkpoints")
CONFIG = "c.ServerApp.ip = '127.0.0.1'\nc.ServerApp.open_browser = False\n"


def copied(place: Path) -> Path:
    """The course in a folder that is not there yet, without what was built in it."""
    return Path(shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*BUILT)))


@contextmanager
def started(course: Path, home: Path) -> Iterator[str]:
    """The address of a server that `make lab` started. It ends with its kernels, come what may.

    home  an empty folder for all that Jupyter keeps for a user; its data_dir has the signatures
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    theirs = {f"JUPYTER_{name.upper()}": str(home / name) for name in ("data_dir", "runtime_dir")}
    config = home / "config_dir"
    config.mkdir(parents=True)
    (config / "jupyter_server_config.py").write_text(CONFIG)
    environment = os.environ | theirs
    environment |= {
        "HOME": str(home),
        "IPYTHONDIR": str(home / "ipython"),
        "MPLCONFIGDIR": matplotlib.get_cachedir(),  # its list of fonts takes seconds to make
        "JUPYTER_CONFIG_DIR": str(config),
        "JUPYTER_PORT": str(port),
        "JUPYTER_PORT_RETRIES": "0",
        "JUPYTER_TOKEN": TOKEN,
        "OMP_NUM_THREADS": "1",
    }
    with (home / "said.txt").open("w") as said:
        server = subprocess.Popen(
            ["make", "lab", f"PY={sys.executable}"],
            cwd=course,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(address, server, home / "said.txt")
            yield address
        finally:
            _end(server)


def _wait(address: str, server: subprocess.Popen, said: Path, seconds: float = 600) -> None:
    """Until the server answers. What it said is in the error when it does not."""
    here = build_opener(ProxyHandler({}))
    request = Request(f"{address}/api/status", headers={"Authorization": f"token {TOKEN}"})
    until = time.monotonic() + seconds
    while True:
        try:
            here.open(request, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < until, said.read_text()
            time.sleep(0.2)


def _end(server: subprocess.Popen) -> None:
    """Kernels have process groups of their own, so every descendant is asked, and then ended."""
    try:
        family = psutil.Process(server.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for each in family:
            try:
                ask(each)
            except psutil.NoSuchProcess:
                pass
        _, family = psutil.wait_procs(family, timeout=15)
    server.kill()
    server.wait()
