"""The one place that turns the name of a Hugging Face repository into a folder of files.

`find("model", "microsoft/deberta-v3-base")` looks in this order:
1. in the mirror: the folder or folders that TIGHT_FIT_MIRROR names, joined by the system's path
   separator. On a machine without internet, attached data sets can so replace the hub.
2. in the hub's local cache under HF_HOME, for the pinned commit;
3. on the hub itself, which is asked only for the files that the course reads, of the pinned commit;
4. in the local cache again, for any other commit, when the hub cannot be reached.

It always gives a folder, so transformers and datasets read local files and never wait for a
network. Nothing here runs code that a repository carries.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

MIRROR = "TIGHT_FIT_MIRROR"
PROBE_SECONDS = 4.0  # how long the hub has to answer
REMEMBER_SECONDS = 60.0  # after a failed probe, how long the hub is not asked again


class HubUnavailable(OSError):
    """Mirror, cache and hub all lack the repository; the message says what to do."""


@dataclass(frozen=True)
class Repo:
    """One repository on the hub.

    id         owner/name
    kind       "model" or "dataset"
    revisions  commits in order of preference; "main" means that none is pinned
    fetch      patterns of the files to download
    needs      groups of patterns of file names: a folder is complete when it has a file of each
    """

    id: str
    kind: str
    revisions: tuple[str, ...]
    fetch: tuple[str, ...]
    needs: tuple[tuple[str, ...], ...]


# The commits were checked against public text: pages of the hub, and the lock files and cache
# listings of other projects. The main branches of both DeBERTa repositories hold weights only in
# PyTorch's pickle format. The hub's conversion bot added them as safetensors in pull request 4 of
# each, which is main's commit and that one file. That commit is the first choice; two pages of the
# hub confirm it, but no other project does. The second choice is main's commit, which many projects
# pin. A mirror or a cache that has only pytorch_model.bin of these two is accepted as well, since
# transformers reads it with weights_only=True.
_DEBERTA_FILES = ("config.json", "spm.model", "tokenizer_config.json", "model.safetensors")
_DEBERTA_NEEDS = (
    ("config.json",),
    ("spm.model", "tokenizer.json"),
    ("model.safetensors", "pytorch_model.bin"),
)
REPOS = {
    (repo.kind, repo.id): repo
    for repo in (
        Repo(
            "microsoft/deberta-v3-base",
            "model",
            (
                "82d8d18a7b88346261ba15d8b1044900a452cf90",
                "8ccc9b6f36199bec6961081d44eb72fb3f7353f3",
            ),
            _DEBERTA_FILES,
            _DEBERTA_NEEDS,
        ),
        Repo(
            "microsoft/deberta-v3-large",
            "model",
            (
                "d0eb112b2451491fbbaf55b168c85825ba1d7ad1",
                "64a8c8eab3e352a784c658aef62be1662607476f",
            ),
            _DEBERTA_FILES,
            _DEBERTA_NEEDS,
        ),
        Repo(
            "google/vit-base-patch16-224-in21k",
            "model",
            ("b4569560a39a0f1af58e3ddaf17facf20ab919b0",),
            ("config.json", "preprocessor_config.json", "model.safetensors"),
            (("config.json",), ("preprocessor_config.json",), ("model.safetensors",)),
        ),
        Repo(
            "uoft-cs/cifar10",
            "dataset",
            ("0b2714987fa478483af9968de7c934580d0bb9a2",),
            ("plain_text/*.parquet",),
            (("train*.parquet",), ("test*.parquet",)),
        ),
        Repo(
            "SetFit/20_newsgroups",
            "dataset",
            ("f1b91292074e7cfb69be58b642d583ec262f30ed",),
            ("train.jsonl", "test.jsonl"),
            (("train*.jsonl", "train*.parquet"), ("test*.jsonl", "test*.parquet")),
        ),
    )
}


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


def find(kind: str, repo_id: str) -> LocalCopy:
    """The folder of a "model" or "dataset" of `REPOS`, downloaded from the hub if necessary.

    Raises ValueError for a repository that is not in `REPOS`, HubUnavailable (an OSError) when it
    is nowhere to be had, and OSError when the disk is full.
    """
    repo = _lookup(kind, repo_id)
    copy = in_mirror(repo) or in_cache(repo, repo.revisions[:1])
    if copy:
        return copy
    problem = unreachable(repo)
    if problem is None:
        problem, copy = download(repo)
    copy = copy or in_cache(repo)
    if copy:
        return copy
    reasons = "; ".join(reason for reason in (problem, *_mirror_problems(repo)) if reason)
    raise HubUnavailable(
        f"{repo.id} cannot be loaded ({reasons}): connect to the internet, or set {MIRROR} to a "
        f"folder that holds {repo.kind}s/{repo.id}, or run the mini profile, which needs neither, "
        "with TIGHT_FIT_PROFILE=mini."
    )


def available(kind: str, repo_id: str) -> str | None:
    """Where `find` would take the repository from: "mirror", "cache", "hub", or None for nowhere.

    It downloads nothing and makes at most one short request. Raises ValueError for a repository
    that is not in `REPOS`.
    """
    repo = _lookup(kind, repo_id)
    copy = in_mirror(repo) or in_cache(repo, repo.revisions[:1])
    if copy:
        return copy.source
    if unreachable(repo) is None:
        return "hub"
    return "cache" if in_cache(repo) else None


# When the hub last gave no answer at all (time.monotonic), and how that showed.
_silent: tuple[float, str] | None = None


def unreachable(repo: Repo) -> str | None:
    """Why the hub cannot be asked for the repository, in a few words, or None when it answers.

    It makes one request without retries, which takes at most PROBE_SECONDS plus one second. A hub
    that gave no answer is not asked again for REMEMBER_SECONDS.
    """
    global _silent
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the local cache does not have it"
    if _silent and time.monotonic() - _silent[0] < REMEMBER_SECONDS:
        return _silent[1]
    status: list[int] = []
    failure = [f"in {PROBE_SECONDS + 1:.0f} seconds"]

    def ask() -> None:
        try:
            url = f"{constants.ENDPOINT}/api/{repo.kind}s/{repo.id}"
            status.append(get_session().get(url, timeout=PROBE_SECONDS).status_code)
        except Exception as error:  # every way in which a network can fail means the same here
            failure.append(f"({type(error).__name__})")

    # A thread, because looking up a host name has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 1)
    if not status:
        _silent = time.monotonic(), f"no answer from {constants.ENDPOINT} {failure[-1]}"
        return _silent[1]
    return None if status[0] == 200 else f"the hub answered with status {status[0]}"


def _lookup(kind: str, repo_id: str) -> Repo:
    if (kind, repo_id) not in REPOS:
        known = ", ".join(f"{known_kind} {known_id}" for known_kind, known_id in REPOS)
        raise ValueError(f"The course does not use the {kind} {repo_id!r}: it knows {known}.")
    return REPOS[kind, repo_id]


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if any(fnmatch(path.name, pattern) for pattern in patterns) and path.is_file()
    )


def _complete(repo: Repo, folder: Path) -> bool:
    return folder.is_dir() and all(_matching(folder, group) for group in repo.needs)


def _mirrors() -> list[Path]:
    return [
        Path(part).expanduser()
        for part in os.environ.get(MIRROR, "").split(os.pathsep)
        if part.strip()
    ]


def in_mirror(repo: Repo) -> LocalCopy | None:
    """The first complete copy in the folders that TIGHT_FIT_MIRROR names, None without one."""
    owner, name = repo.id.split("/")
    cached = f"{repo.kind}s--{owner}--{name}"
    for mirror in _mirrors():
        for folder in (f"{repo.kind}s/{repo.id}", repo.id, f"{owner}--{name}", name):
            if _complete(repo, mirror / folder):
                return LocalCopy(repo, mirror / folder, "mirror", None)
        for cache in (mirror / cached, mirror / "hub" / cached):
            for snapshot in _snapshots(repo, cache):
                if _complete(repo, snapshot):
                    return LocalCopy(repo, snapshot, "mirror", snapshot.name)
    return None


def _mirror_problems(repo: Repo) -> list[str]:
    if not _mirrors():
        return [f"{MIRROR} is not set"]
    faults = {True: "has no complete copy of it", False: "is no folder"}
    return [f"{MIRROR} names {mirror}, which {faults[mirror.is_dir()]}" for mirror in _mirrors()]


def in_cache(repo: Repo, revisions: tuple[str, ...] | None = None) -> LocalCopy | None:
    """The first complete snapshot in the hub's cache, of `revisions` alone if given."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{repo.kind}s--{repo.id.replace('/', '--')}"
    for snapshot in _snapshots(repo, folder):
        if (revisions is None or snapshot.name in revisions) and _complete(repo, snapshot):
            return LocalCopy(repo, snapshot, "cache", snapshot.name)
    return None


def _snapshots(repo: Repo, folder: Path) -> Iterator[Path]:
    """The snapshots in a folder of a hub cache: pinned commits, then main's, then all others."""
    main = folder / "refs" / "main"
    wanted = list(repo.revisions) + ([main.read_text().strip()] if main.is_file() else [])
    others = sorted(path.name for path in (folder / "snapshots").glob("*"))
    for commit in dict.fromkeys(wanted + others):
        if (folder / "snapshots" / commit).is_dir():
            yield folder / "snapshots" / commit


def download(repo: Repo) -> tuple[str, LocalCopy | None]:
    """(what went wrong, None) or ("", the copy): the first of the repository's commits on the hub.

    Raises OSError when the disk is full.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    problem = "the hub has none of the pinned commits"
    for revision in repo.revisions:
        # Where the first choice is gone: main's commit of the DeBERTa models has no safetensors.
        more = () if revision == repo.revisions[0] else ("pytorch_model.bin",)
        try:
            path = Path(
                snapshot_download(
                    repo.id,
                    repo_type=repo.kind,
                    revision=revision,
                    allow_patterns=[*repo.fetch, *more],
                )
            )
        except RevisionNotFoundError:
            continue
        except Exception as error:  # the hub, the network and the disk each raise their own kinds
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            return f"the download broke off ({type(error).__name__})", None
        if _complete(repo, path):
            return "", LocalCopy(repo, path, "hub", path.name)
        problem = "the hub's copy lacks files that the course needs"
    return problem, None
