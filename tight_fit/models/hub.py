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
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tight_fit.models.local import (
    MIRROR,
    LocalCopy,
    cache_of,
    complete,
    in_cache,
    in_mirror,
    mirror_problems,
    undamaged,
)
from tight_fit.models.repositories import REPOS, Repo

STILL_SECONDS = 60.0  # without a new byte, after which a download is given up
LOOK_SECONDS = 0.5  # between two looks at what has come
PROBE_SECONDS = 4.0  # how long the hub has to answer
REMEMBER_SECONDS = 60.0  # after a failed probe, how long the hub is not asked again

Fetched = TypeVar("Fetched")


class HubUnavailable(OSError):
    """Mirror, cache and hub all lack the repository; the message says what to do."""


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
    reasons = "; ".join(reason for reason in (problem, *mirror_problems(repo)) if reason)
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
            path = Path(while_it_grows(fetch, cache_of(repo), STILL_SECONDS))
        except RevisionNotFoundError:
            continue
        except StoodStill as error:
            _silent = time.monotonic(), f"the hub answered and then stood still: {error}"
            return _silent[1], None
        except Exception as error:  # the hub, the network and the disk each raise their own kinds
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            return f"the download broke off ({type(error).__name__})", None
        if complete(repo, path):
            return "", LocalCopy(repo, path, "hub", path.name)
        problem = "the hub's copy lacks files that the course needs"
    return problem, None


class StoodStill(TimeoutError):
    """Nothing came for so long that the other side counts as silent."""


def while_it_grows(fetch: Callable[[], Fetched], folder: Path, seconds: float) -> Fetched:
    """What `fetch()` gives, as long as the files below `folder` grow.

    Libraries limit how long a single read may take, and read again and again from a server that
    never says anything of use. So this looks at what has arrived.

    seconds  without a new byte, after which the wait ends; the thread of `fetch` is left behind
    Raises StoodStill, and whatever `fetch` raises.
    """
    given: list[Fetched] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            given.append(fetch())
        except BaseException as error:  # raised again below, in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    arrived, since = _bytes_in(folder), time.monotonic()
    while True:
        thread.join(LOOK_SECONDS)
        if raised:
            raise raised[0]
        if not thread.is_alive():
            return given[0]
        now = _bytes_in(folder)
        if now != arrived:
            arrived, since = now, time.monotonic()
        elif time.monotonic() - since > seconds:
            raise StoodStill(f"nothing came for {seconds:g} seconds")


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # gone, or a link to nothing
            continue
    return total
