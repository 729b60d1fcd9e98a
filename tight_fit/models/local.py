"""Copies of a repository on this machine: in a mirror, or in the hub's local cache.

Nothing here asks a network. A mirror is a folder that TIGHT_FIT_MIRROR names; it holds folders of
repositories, or snapshots as the hub's cache has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tight_fit.models.damaged import fault
from tight_fit.models.repositories import Repo

MIRROR = "TIGHT_FIT_MIRROR"


class DamagedCopy(ValueError):
    """A copy of a repository holds a file that is not what its name says; the message names it."""


@dataclass(frozen=True)
class LocalCopy:
    """A complete folder of one repository.

    source    where it came from: "mirror", "cache" or "hub"
    revision  its commit; None for a folder of the mirror that does not say which commit it is
    """

    repo: Repo
    path: Path
    source: str
    revision: str | None

    def files(self, *patterns: str) -> list[Path]:
        """The files whose name matches one of the patterns, sorted by path."""
        return _matching(self.path, patterns)


def undamaged(copy: LocalCopy) -> LocalCopy:
    """The copy itself. Raises DamagedCopy, which names the first file that cannot be right."""
    for path in copy.files(*(pattern for group in copy.repo.needs for pattern in group)):
        wrong = fault(path)
        if wrong:
            raise DamagedCopy(
                f"The copy of {copy.repo.id} from the {copy.source} cannot be used: {path} {wrong}."
            )
    return copy


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if any(fnmatch(path.name, pattern) for pattern in patterns) and path.is_file()
    )


def complete(repo: Repo, folder: Path) -> bool:
    """Whether a folder has every file that the repository needs."""
    return folder.is_dir() and all(_matching(folder, group) for group in repo.needs)


def _mirrors() -> list[Path]:
    # Unlike the method of a path, this leaves "~" alone where there is no such user or no home.
    return [
        Path(os.path.expanduser(part))
        for part in os.environ.get(MIRROR, "").split(os.pathsep)
        if part.strip()
    ]


def folder_in_mirror(name: str) -> Path | None:
    """The folder of any model in the folders that TIGHT_FIT_MIRROR names, None without one."""
    for mirror in _mirrors():
        for folder in (f"models/{name}", name, name.replace("/", "--")):
            if (mirror / folder / "config.json").is_file():
                return mirror / folder
    return None


def in_mirror(repo: Repo) -> LocalCopy | None:
    """The first complete copy in the folders that TIGHT_FIT_MIRROR names, None without one."""
    owner, name = repo.id.split("/")
    cached = f"{repo.kind}s--{owner}--{name}"
    for mirror in _mirrors():
        for folder in _folders(repo):
            if complete(repo, mirror / folder):
                return LocalCopy(repo, mirror / folder, "mirror", None)
        for cache in (mirror / cached, mirror / "hub" / cached):
            for snapshot in _snapshots(repo, cache):
                if complete(repo, snapshot):
                    return LocalCopy(repo, snapshot, "mirror", snapshot.name)
    return None


def _folders(repo: Repo) -> tuple[str, ...]:
    """Where a mirror may hold a repository."""
    owner, name = repo.id.split("/")
    return f"{repo.kind}s/{repo.id}", repo.id, f"{owner}--{name}", name


def mirror_problems(repo: Repo) -> list[str]:
    """Why each mirror cannot give the repository, in words; or that there is no mirror."""
    if not _mirrors():
        return [f"{MIRROR} is not set"]
    return [f"{MIRROR} names {mirror}, which {_lack(repo, mirror)}" for mirror in _mirrors()]


def _lack(repo: Repo, mirror: Path) -> str:
    """What a mirror lacks, as the end of a sentence: the folder itself, the copy, or a file."""
    if not mirror.is_dir():
        return "is no folder"
    for folder in _folders(repo):
        missing = [group for group in repo.needs if not _matching(mirror / folder, group)]
        if (mirror / folder).is_dir() and len(missing) < len(repo.needs):
            return (
                "has no complete copy of it: "
                f"{folder} lacks {' and '.join(' or '.join(group) for group in missing)}"
            )
    return "has no complete copy of it"


def in_cache(repo: Repo, revisions: tuple[str, ...] | None = None) -> LocalCopy | None:
    """The first complete snapshot in the hub's cache, of `revisions` alone if given."""
    for snapshot in _snapshots(repo, cache_of(repo)):
        if (revisions is None or snapshot.name in revisions) and complete(repo, snapshot):
            return LocalCopy(repo, snapshot, "cache", snapshot.name)
    return None


def cache_of(repo: Repo) -> Path:
    """The folder in which the hub's library keeps the repository, be it there or not."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"{repo.kind}s--{repo.id.replace('/', '--')}"


def _snapshots(repo: Repo, folder: Path) -> Iterator[Path]:
    """The snapshots in a folder of a hub cache: pinned commits, then main's, then all others."""
    main = folder / "refs" / "main"
    wanted = list(repo.revisions) + ([main.read_text().strip()] if main.is_file() else [])
    others = sorted(path.name for path in (folder / "snapshots").glob("*"))
    for commit in dict.fromkeys(wanted + others):
        if (folder / "snapshots" / commit).is_dir():
            yield folder / "snapshots" / commit
