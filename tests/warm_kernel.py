"""Kernels for nbval, forked from one process that has imported the libraries of the lessons.

Importing them takes 8 of the 9 seconds of CPU time of a lesson's first cell. Nothing of the course
is imported before, so a lesson still imports whatever it uses. `make run` starts kernels in the
usual way.

`pytest -p tests.warm_kernel` starts the process. For each notebook Jupyter runs this file, as
jupyter/kernels/warm/kernel.json says, with the name of a connection file: it asks for a kernel, and
they end together.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

ADDRESS = "TIGHT_FIT_WARM_KERNELS"  # the variable that holds the socket's address
ROOT = Path(__file__).parent.parent
IMPORTS = (
    *("ipykernel.kernelapp", "matplotlib.pyplot", "pandas", "datasets", "torch._dynamo"),
    *("transformers.models.deberta_v2.modeling_deberta_v2", "transformers.models.vit.modeling_vit"),
)


def start(folder: Path) -> subprocess.Popen:
    """Start the process that imports. From now on Jupyter finds the kernel "warm".

    `folder` is for its socket.
    """
    from helpers.setup import QUIET

    os.environ[ADDRESS] = str(folder / "kernels.sock")
    paths = [str(ROOT / "tests" / "jupyter"), os.environ.get("JUPYTER_PATH", "")]
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, paths))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.environ[ADDRESS])
        listening.listen()
        # Read by libraries when they are imported: the backend is that of every kernel.
        variables = QUIET | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.warm_kernel"],
            cwd=ROOT,
            env=os.environ | variables,
            stdin=listening,
        )


def pytest_configure(config):
    """Start the process for this run, and let its workers take its kernels."""
    config.option.nbval_kernel_name = "warm"
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.TemporaryDirectory()
    process = start(Path(folder.name))
    config.add_cleanup(lambda: (process.kill(), process.wait(), folder.cleanup()))


def ask(connection_file: str) -> None:
    """Ask for a kernel, and wait for its end."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(os.environ[ADDRESS])
        wanted = {"file": connection_file, "folder": os.getcwd(), "variables": dict(os.environ)}
        socket.send_fds(asking, [json.dumps(wanted).encode() + b"\n"], [1, 2])
        asking.recv(1)  # nothing, when the kernel has ended


def serve() -> None:
    """Fork a kernel for everyone who asks."""
    for name in IMPORTS:
        __import__(name)
    listening = socket.socket(fileno=0)
    while True:
        asking, _ = listening.accept()
        if not os.fork():
            run(asking)
        asking.close()
        with suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def run(asking: socket.socket) -> None:
    """Be a kernel, until it is shut down or nobody waits for it any more."""
    os.setsid()
    told, files, *_ = socket.recv_fds(asking, 2**16, 2)
    while not told.endswith(b"\n"):
        told += asking.recv(2**16)
    wanted = json.loads(told)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for there, here in zip(files, (1, 2), strict=True):
        os.dup2(there, here)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["variables"])
    sys.path[0] = ""  # as in a kernel of Jupyter's

    def watch():
        asking.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(argv=["-f", wanted["file"]])
    os._exit(0)


if __name__ == "__main__":
    ask(sys.argv[1]) if sys.argv[1:] else serve()
