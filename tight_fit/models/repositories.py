"""The repositories of the hub that the course reads, each with its pinned commits and its files."""

from __future__ import annotations

from dataclasses import dataclass


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
