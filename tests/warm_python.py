"""Kernels for nbval and their ranks, forked from one process that has imported the libraries.

Importing them takes 8 of the 9 seconds of CPU time of a lesson's first cell, and 6 of a rank.
Nothing of the course is imported before, so a lesson still imports whatever it uses. `make run`
starts kernels in the usual way, and tests of `helpers.parallel.launch` start ranks so.

`pytest -p tests.warm_python` starts the process, and writes a program `python` that asks it for a
fork which runs what this Python was asked to run. Jupyter starts it for each notebook, as the
kernel "warm"; torchrun for each rank, as PYTHON_EXEC says.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTS = (
    *("ipykernel.kernelapp", "matplotlib.pyplot", "pandas", "datasets", "torch._dynamo"),
    *("torch.distributed.launcher.api", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("transformers.models.deberta_v2.modeling_deberta_v2", "transformers.models.vit.modeling_vit"),
    "transformers.models.qwen3.modeling_qwen3",
)
# The program `python`: it asks for a fork, tells it the signals that it is sent, and ends as it.
ASK = """#!{python} -SI
import json, os, signal, socket, sys

wanted = {{"words": sys.argv[1:], "folder": os.getcwd(), "variables": dict(os.environ)}}
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect({address!r})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asking.send(b"%d\\n" % number))
    socket.send_fds(asking, [json.dumps(wanted).encode() + b"\\n"], [1, 2])
    code = int(asking.recv(16) or 1)
if code < 0:  # ended by a signal
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def start(folder: Path) -> subprocess.Popen:
    """Start the process that imports. From now on Jupyter finds the kernel "warm".

    `folder` is for its socket, for `python` and for the kernel's specification.
    """
    from helpers.setup import QUIET

    address, python = str(folder / "socket"), folder / "python"
    python.write_text(ASK.format(python=sys.executable, address=address))
    python.chmod(0o755)
    specification = {
        "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python, with the course's libraries imported",
        "language": "python",
        "interrupt_mode": "message",
        "env": {"PYTHON_EXEC": str(python)},
    }
    kernel = folder / "jupyter" / "kernels" / "warm" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps(specification))
    paths = [str(folder / "jupyter"), os.environ.get("JUPYTER_PATH", "")]
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, paths))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        # Read by libraries when they are imported: the backend is that of every kernel.
        variables = QUIET | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.warm_python"],
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


def serve() -> None:
    """Fork for everyone who asks."""
    for name in IMPORTS:
        importlib.import_module(name)
    listening = socket.socket(fileno=0)
    while True:  # a fork keeps the listening socket as its file 0, which `run` replaces
        asking, _ = listening.accept()
        if not os.fork():
            keep(asking)
        asking.close()
        with suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def keep(asking: socket.socket) -> None:
    """Run in a fork what was asked for, pass signals on, and tell how it ended.

    It is killed when nobody waits for it any more.
    """
    told, files, *_ = socket.recv_fds(asking, 2**16, 2)
    while not told.endswith(b"\n"):
        told += asking.recv(2**16)
    process = os.fork()
    if not process:
        asking.close()
        code = run(json.loads(told), files)
        sys.stdout.flush()
        os._exit(code)

    def pass_on():
        with suppress(OSError):  # it has ended
            while numbers := asking.recv(16):
                for number in numbers.split():
                    os.kill(process, int(number))
            os.kill(process, signal.SIGKILL)

    threading.Thread(target=pass_on, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with suppress(OSError):  # nobody waits
        asking.send(b"%d" % code)
    os._exit(0)


def run(wanted: dict, files: list[int]) -> int:
    """Be a Python that runs a module (-m) or a script; returns its exit code."""
    import torch

    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for there, here in zip(files, (1, 2), strict=True):
        os.dup2(there, here)
        os.close(there)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["variables"])
    torch.distributed.set_debug_level_from_env()  # which PyTorch does when it is imported
    words = wanted["words"]
    if words[0] == "-u":
        words.pop(0)
    if module := words[0] == "-m":
        words.pop(0)
    sys.argv = words
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = ["" if module else str(Path(words[0]).parent), *filter(None, paths)]
    try:
        if module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:  # as Python does: a sentence is written, and a number is the code
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        frames, above = error.__traceback__, {__file__, runpy.run_path.__code__.co_filename}
        while frames and frames.tb_frame.f_code.co_filename in above:
            frames = frames.tb_next  # a Python of one's own begins in the script
        traceback.print_exception(error.with_traceback(frames))
        return 1
    return 0


if __name__ == "__main__":
    serve()
