"""What requirements.txt asks for, against what is installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def requirements() -> list:
    """What a notebook needs, as packaging's `Requirement`, from requirements.txt."""
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.txt").read_text(encoding="utf8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def problems() -> dict[str, str]:
    """{package: what is wrong with it}, of what a notebook needs; empty when all is well."""
    wrong = {}
    for requirement in requirements():
        version = installed(requirement.name)
        if version is None:
            wrong[requirement.name] = f"{requirement} is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong[requirement.name] = f"{requirement} is needed but {version} is installed"
    return wrong


def installed(name: str) -> str | None:
    """The version of a package, by the name that pip knows; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
