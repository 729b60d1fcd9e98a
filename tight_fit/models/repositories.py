"""The repositories of the hub that the course reads, each with its pinned commits and its files
(known/repositories.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KNOWN = Path(__file__).parent / "known" / "repositories.json"


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


def _read() -> Iterator[Repo]:
    for row in json.loads(KNOWN.read_text(encoding="utf8")):
        needs = tuple(map(tuple, row["needs"]))
        yield Repo(row["id"], row["kind"], tuple(row["revisions"]), tuple(row["fetch"]), needs)


# The commits were checked against public text: pages of the hub, and the lock files and cache
# listings of other projects. The main branches of both DeBERTa repositories hold weights only in
# PyTorch's pickle format. The hub's conversion bot added them as safetensors in pull request 4 of
# each, which is main's commit and that one file. That commit is the first choice; two pages of the
# hub confirm it, but no other project does. The second choice is main's commit, which many projects
# pin. A mirror or a cache that has only pytorch_model.bin of these two is accepted as well, since
# transformers reads it with weights_only=True.
#
# The licence of Qwen3 is the Apache License 2.0, whose text is in its repositories.
REPOS = {(repo.kind, repo.id): repo for repo in _read()}
