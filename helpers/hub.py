"""The one place that turns a name on the Hugging Face hub into a folder of files.

`find("model", "microsoft/deberta-v3-base")` looks, in this order, in
1. the mirror: the folder or folders that TIGHT_FIT_MIRROR names (joined by the system's path separator), so
   that attached data sets stand for the hub where there is no internet;
2. the hub's local cache under HF_HOME, for the pinned commit;
3. the hub itself: only the files that the course reads, of the pinned commit;
4. the local cache again, for any other commit, when the hub cannot be reached.

What comes back is always a folder, so transformers and datasets read local files and never wait for a
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
REMEMBER_SECONDS = 60.0  # how long a failed probe is believed


class HubUnavailable(OSError):
    """Neither the mirror, nor the cache, nor the hub has the repository; the message says what to do."""


@dataclass(frozen=True)
class Repo:
    """One repository that the course uses.

    revisions  commits in order of preference; "main" would mean that none is pinned
    fetch      patterns of the files taken from the hub
    needs      groups of patterns of file names: a folder is complete when it has one file of every group
    """

    id: str
    kind: str  # "model" or "dataset"
    revisions: tuple[str, ...]
    fetch: tuple[str, ...]
    needs: tuple[tuple[str, ...], ...]


# Commits were checked against public text: pages of the hub, and other projects' pins (lock files, cache
# listings). Both DeBERTa repositories hold, on their main branch, weights in PyTorch's pickle format only.
# The hub's conversion bot put them as safetensors into pull request 4 of each (main's commit plus that one
# file): that commit comes first, confirmed on two pages of the hub but by no other project; main's, confirmed
# by many projects' pins, is the second choice. A mirror or cache that holds just pytorch_model.bin of these
# two is accepted: transformers reads it with weights_only=True.
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
class Found:
    """A complete folder of one repository: `path`, its `source` ("mirror", "cache" or "hub") and its commit.

    `revision` is None for a mirror folder that does not say which commit it is.
    """

    repo: Repo
    path: Path
    source: str
    revision: str | None

    @property
    def safetensors(self) -> bool:
        """Whether a model's weights are safetensors: the value for `from_pretrained(use_safetensors=...)`."""
        return any(self.path.glob("*.safetensors"))

    def files(self, *patterns: str) -> list[Path]:
        """Files whose name fits one of the patterns, sorted by path."""
        return _matching(self.path, patterns)


def find(kind: str, repo_id: str) -> Found:
    """The folder that holds a "model" or "dataset" of the table, fetched from the hub if need be.

    Raises ValueError for a repository that the table does not have, HubUnavailable (an OSError) when no way
    leads to it.
    """
    repo = _lookup(kind, repo_id)
    found = _in_mirror(repo) or _in_cache(repo, repo.revisions[:1])
    if found:
        return found
    problem = unreachable(repo)
    if problem is None:
        problem, found = _from_hub(repo)
    found = found or _in_cache(repo)
    if found:
        return found
    reasons = "; ".join(reason for reason in (problem, *_mirror_problems(repo)) if reason)
    raise HubUnavailable(
        f"{repo.id} cannot be loaded ({reasons}): connect to the internet, or set {MIRROR} to a folder that "
        f"holds {repo.kind}s/{repo.id}, or run the mini profile, which needs neither, with "
        "TIGHT_FIT_PROFILE=mini."
    )


def available(kind: str, repo_id: str) -> str | None:
    """Where `find` would take the repository from, "mirror", "cache" or "hub", or None; downloads nothing.

    At most one short request. Raises ValueError for a repository that the table does not have.
    """
    repo = _lookup(kind, repo_id)
    found = _in_mirror(repo) or _in_cache(repo, repo.revisions[:1])
    if found:
        return found.source
    if unreachable(repo) is None:
        return "hub"
    return "cache" if _in_cache(repo) else None


_silent: tuple[float, str] | None = (
    None  # when the hub last gave no answer at all, and how that showed
)


def unreachable(repo: Repo) -> str | None:
    """Why the hub cannot be asked for the repository, in a few words, or None when it answers.

    One request without retries, bounded by PROBE_SECONDS plus one second; silence is believed for
    REMEMBER_SECONDS.
    """
    global _silent
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the local cache does not have it"
    if _silent and time.monotonic() - _silent[0] < REMEMBER_SECONDS:
        return _silent[1]
    status, failure = [], [f"in {PROBE_SECONDS + 1:.0f} seconds"]

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


def _in_mirror(repo: Repo) -> Found | None:
    owner, name = repo.id.split("/")
    cached = f"{repo.kind}s--{owner}--{name}"
    for mirror in _mirrors():
        for folder in (f"{repo.kind}s/{repo.id}", repo.id, f"{owner}--{name}", name):
            if _complete(repo, mirror / folder):
                return Found(repo, mirror / folder, "mirror", None)
        for folder in (mirror / cached, mirror / "hub" / cached):
            for snapshot in _snapshots(repo, folder):
                if _complete(repo, snapshot):
                    return Found(repo, snapshot, "mirror", snapshot.name)
    return None


def _mirror_problems(repo: Repo) -> list[str]:
    if not _mirrors():
        return [f"{MIRROR} is not set"]
    faults = {True: "has no complete copy of it", False: "is no folder"}
    return [f"{MIRROR} names {mirror}, which {faults[mirror.is_dir()]}" for mirror in _mirrors()]


def _in_cache(repo: Repo, revisions: tuple[str, ...] | None = None) -> Found | None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{repo.kind}s--{repo.id.replace('/', '--')}"
    for snapshot in _snapshots(repo, folder):
        if (revisions is None or snapshot.name in revisions) and _complete(repo, snapshot):
            return Found(repo, snapshot, "cache", snapshot.name)
    return None


def _snapshots(repo: Repo, folder: Path) -> Iterator[Path]:
    """Snapshots in a repository's folder of a hub cache: pinned commits, then main's, then others."""
    main = folder / "refs" / "main"
    wanted = list(repo.revisions) + ([main.read_text().strip()] if main.is_file() else [])
    others = sorted(path.name for path in (folder / "snapshots").glob("*"))
    for commit in dict.fromkeys(wanted + others):
        if (folder / "snapshots" / commit).is_dir():
            yield folder / "snapshots" / commit


def _from_hub(repo: Repo) -> tuple[str, Found | None]:
    """(what went wrong, what was found); raises OSError when the disk is full."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    problem = "the hub has none of the pinned commits"
    for revision in repo.revisions:
        # Only where the first choice is gone: main's commit of the DeBERTa models has no safetensors.
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
            return "", Found(repo, path, "hub", path.name)
        problem = "the hub's copy lacks files that the course needs"
    return problem, None
