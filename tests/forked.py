"""Ranks for tests, forked from a process that has imported the course already.

`helpers.parallel.launch` starts each rank afresh by torchrun, which imports torch and transformers
once per rank. It has tests of its own (test_launch.py), and tests that kill a rank use it.
"""

import faulthandler
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

IMPORTS = [
    "torch.distributed.tensor", "helpers.train", "tight_fit.layouts.plan",
    "tests.by_hand.test_frameworks", "peft", "bitsandbytes",
    "transformers.models.qwen3.modeling_qwen3",
]  # fmt: skip
ROOT = Path(__file__).parent.parent


def forked(script: str | Path, *arguments: object, ranks: int, timeout: float = 900.0) -> list[str]:
    """Run a script as `ranks` processes, as `launch` does, and return what each printed.

    Raises RuntimeError with the traceback of the first that failed, and TimeoutError after
    `timeout` seconds.
    """
    words = tuple(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes = [
            _server().Process(target=_rank, args=(str(script), words, rank, ranks, port, folder))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, Path(folder), time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [Path(folder, f"{rank}.txt").read_text() for rank in range(ranks)]


def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:  # the server finds the course by it
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
    return context


def _wait(processes: list, folder: Path, end: float) -> None:
    running = True
    while running:
        # Asked first: a failure just after it is seen below, or next time.
        running = any(process.is_alive() for process in processes)
        for rank, process in enumerate(processes):
            if process.exitcode:
                error = folder / f"{rank}.error"
                trace = error.read_text() if error.exists() else ""
                raise RuntimeError(
                    f"Rank {rank} failed with exit code {process.exitcode}:\n{trace}"
                )
        if running and time.monotonic() > end:
            raise TimeoutError("The ranks were not done in time and were stopped.")
        time.sleep(0.02)


def results(out: Iterable[str]) -> list[Any]:
    """What ranks printed as JSON in lines that begin with RESULT."""
    lines = [line for text in out for line in text.splitlines()]
    return [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]


def _rank(
    script: str, words: tuple[str, ...], rank: int, ranks: int, port: int, folder: str
) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
    }  # fmt: skip
    sys.argv = [script, *words]
    sys.stdout = open(Path(folder, f"{rank}.txt"), "w", buffering=1)
    sys.stderr = open(Path(folder, f"{rank}.error"), "w", buffering=1)
    faulthandler.enable(sys.stderr)  # a signal that ends the rank leaves where its threads were
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # as Python does: a sentence is written, and a number is the code
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(end.code if isinstance(end.code, str) else "", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # gloo's threads now and then abort while Python is taken down
