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
from functools import partial
from pathlib import Path

from helpers.downloads.damaged import fault
from helpers.downloads.patience import StoodStill, while_it_grows

MIRROR = "TIGHT_FIT_MIRROR"
STILL_SECONDS = 60.0  # without a new byte, after which a download is given up
PROBE_SECONDS = 4.0  # how long the hub has to answer
REMEMBER_SECONDS = 60.0  # after a failed probe, how long the hub is not asked again


class DamagedCopy(ValueError):
    """A copy of a repository holds a file that is not what its name says; the message names it."""


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
_DECODER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "LICENSE",
)
_DECODER_NEEDS = (("config.json",), ("tokenizer.json",), ("tokenizer_config.json",))
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
        # Apache License 2.0, whose text is in the repositories.
        Repo(
            "Qwen/Qwen3-0.6B",
            "model",
            ("c1899de289a04d12100db370d81485cdf75e47ca",),
            (*_DECODER_FILES, "model.safetensors"),
            (*_DECODER_NEEDS, ("model.safetensors",)),
        ),
        Repo(
            "Qwen/Qwen3-1.7B",
            "model",
            ("70d244cc86ccca08cf5af4e1e306ecf908b1ad5e",),
            (*_DECODER_FILES, "model-*.safetensors", "model.safetensors.index.json"),
            (
                *_DECODER_NEEDS,
                ("model.safetensors.index.json",),
                ("model-00001-of-00002.safetensors",),
                ("model-00002-of-00002.safetensors",),
            ),
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

    Raises ValueError for a repository that is not in `REPOS`, DamagedCopy (a ValueError) where a
    file of the copy is not what its name says, HubUnavailable (an OSError) when the repository is
    nowhere to be had, and OSError when the disk is full.
    """
    repo = _lookup(kind, repo_id)
    copy = in_mirror(repo) or in_cache(repo, repo.revisions[:1])
    if copy:
        return undamaged(copy)
    problem = unreachable(repo)
    if problem is None:
        problem, copy = download(repo)
    copy = copy or in_cache(repo)
    if copy:
        return undamaged(copy)
    reasons = "; ".join(reason for reason in (problem, *_mirror_problems(repo)) if reason)
    raise HubUnavailable(
        f"{repo.id} cannot be loaded ({reasons}): connect to the internet, or set {MIRROR} to a "
        f"folder that holds {repo.kind}s/{repo.id}, or run the mini profile, which needs neither, "
        "with TIGHT_FIT_PROFILE=mini."
    )


def undamaged(copy: LocalCopy) -> LocalCopy:
    """The copy itself. Raises DamagedCopy, which names the first file that cannot be right."""
    for path in copy.files(*(pattern for group in copy.repo.needs for pattern in group)):
        wrong = fault(path)
        if wrong:
            raise DamagedCopy(
                f"The copy of {copy.repo.id} from the {copy.source} cannot be used: {path} {wrong}."
            )
    return copy


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
            if _complete(repo, mirror / folder):
                return LocalCopy(repo, mirror / folder, "mirror", None)
        for cache in (mirror / cached, mirror / "hub" / cached):
            for snapshot in _snapshots(repo, cache):
                if _complete(repo, snapshot):
                    return LocalCopy(repo, snapshot, "mirror", snapshot.name)
    return None


def _folders(repo: Repo) -> tuple[str, ...]:
    """Where a mirror may hold a repository."""
    owner, name = repo.id.split("/")
    return f"{repo.kind}s/{repo.id}", repo.id, f"{owner}--{name}", name


def _mirror_problems(repo: Repo) -> list[str]:
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
    for snapshot in _snapshots(repo, _cache_of(repo)):
        if (revisions is None or snapshot.name in revisions) and _complete(repo, snapshot):
            return LocalCopy(repo, snapshot, "cache", snapshot.name)
    return None


def _cache_of(repo: Repo) -> Path:
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


def download(repo: Repo) -> tuple[str, LocalCopy | None]:
    """(what went wrong, None) or ("", the copy): the first of the repository's commits on the hub.

    A download that brings no byte for `STILL_SECONDS` is given up. Raises OSError when the disk is
    full.
    """
    global _silent
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    problem = "the hub has none of the pinned commits"
    for revision in repo.revisions:
        # Where the first choice is gone: main's commit of the DeBERTa models has no safetensors.
        more = () if revision == repo.revisions[0] else ("pytorch_model.bin",)
        fetch = partial(
            snapshot_download,
            repo.id,
            repo_type=repo.kind,
            revision=revision,
            allow_patterns=[*repo.fetch, *more],
        )
        try:
            path = Path(while_it_grows(fetch, _cache_of(repo), STILL_SECONDS))
        except RevisionNotFoundError:
            continue
        except StoodStill as error:
            _silent = time.monotonic(), f"the hub answered and then stood still: {error}"
            return _silent[1], None
        except Exception as error:  # the hub, the network and the disk each raise their own kinds
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            return f"the download broke off ({type(error).__name__})", None
        if _complete(repo, path):
            return "", LocalCopy(repo, path, "hub", path.name)
        problem = "the hub's copy lacks files that the course needs"
    return problem, None
