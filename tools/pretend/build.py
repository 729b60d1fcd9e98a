"""Compile the pretended GPU's library, once for each version of its source, of torch and Python."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NATIVE = Path(__file__).resolve().parent / "native"
FOLDER = ROOT / "build" / "pretended"
SECONDS = 900.0  # that the compiler may take


class CannotCompile(RuntimeError):
    """The library cannot be compiled here; the message says why, and what would help."""


def library() -> Path:
    """The compiled library, made now where it is not there yet (about 15 s of a quiet core).

    Raises CannotCompile where there is no compiler for C++20 or no Linux, where PyTorch brings CUDA
    of its own, or where it fails.
    """
    if sys.platform != "linux":
        raise CannotCompile("The pretended GPU is built on Linux alone: run this there.")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotCompile("No C++ compiler is here for the pretended GPU: install g++.")
    torch = _folder_of_torch()
    sources = sorted(NATIVE.glob("*"))
    version = (torch / "version.py").read_bytes()
    if re.search(rb"^(cuda|hip)\b[^=]*= *['\"]", version, re.MULTILINE):
        raise CannotCompile(
            "The pretended GPU takes the place of CUDA, and this PyTorch is built for it: run "
            "this in an environment with PyTorch's build for CPUs."
        )
    digest = hashlib.sha256(b"\0".join([version, *(path.read_bytes() for path in sources)]))
    path = FOLDER / f"libpretended-{platform.machine()}-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        _compile(compiler, torch, path)
    return path


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Inside, no other process that rehearses in this checkout is inside the same name."""
    import fcntl

    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _folder_of_torch() -> Path:
    """Where torch is installed, without importing it: the library must be loaded first."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotCompile("PyTorch is not installed: run `pip install -r requirements.txt`.")
    return Path(found.origin).parent


def _compile(compiler: str, torch: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    command = [compiler, "-O1", "-shared", "-fPIC", "-std=c++20", "-w"]
    command += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    command += [str(NATIVE / "device.cpp"), "-o", str(unfinished), f"-L{torch / 'lib'}"]
    command += ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "it fails")
            raise CannotCompile(f"The pretended GPU does not compile with this PyTorch: {first}")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
