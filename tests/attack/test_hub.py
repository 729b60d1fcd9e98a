"""Hub and mirrors: silent hubs, pointers in place of files, copies that broke off."""

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.attack import one_sentence, refused
from tests.models.test_hub import BASE, CIFAR, SMALLEST, VIT, stub
from tight_fit.models import hub
from tight_fit.models.local import DamagedCopy
from tight_fit.models.repositories import Repo

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 371146213\n"
GROUPS = "SetFit/20_newsgroups"
DAMAGE = [
    (BASE, "model.safetensors", b"", "is empty"),
    (BASE, "model.safetensors", POINTER, "git lfs pull"),
    (BASE, "model.safetensors", b"\xff" * 400, "is no safetensors file"),
    (BASE, "model.safetensors", SMALLEST[".safetensors"] + b"more", "its header says 10"),
    (BASE, "spm.model", b"", "is empty"),
    (BASE, "spm.model", b"\x93" * 400, "is no sentencepiece model"),
    (BASE, "config.json", b"{", "is no JSON"),
    (BASE, "config.json", b"[]", "holds no JSON object"),
    (BASE, "config.json", '{"a": "é"}'.encode("latin-1"), "is no JSON"),
    (VIT, "preprocessor_config.json", b"", "is empty"),
    (CIFAR, "plain_text/train-00000-of-00001.parquet", b"", "is empty"),
    (CIFAR, "plain_text/test-00000-of-00001.parquet", b"PAR1 and no end", "is no Parquet file"),
    (GROUPS, "train.jsonl", b"", "is empty"),
    (GROUPS, "train.jsonl", b"\n\n", "holds no rows"),
    (GROUPS, "test.jsonl", b"text,label\n", "no JSON object in its first line"),
    (GROUPS, "test.jsonl", b'{"text": "a", "label": 1}\n{"text": "b', "broke off"),
]


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A mirror, an empty cache, no hub."""
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "unreachable", lambda repo: "no answer from the hub")
    monkeypatch.setattr(hub, "_silent", None)


def kind_of(repo_id):
    return "dataset" if repo_id in (CIFAR, GROUPS) else "model"


def mirrored(folder, repo_id):
    if repo_id != GROUPS:
        return stub(folder / f"{kind_of(repo_id)}s" / repo_id, repo_id)
    made = folder / "datasets" / repo_id
    made.mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        (made / name).write_bytes(b'{"text": "a", "label": 1}\n')
    return made


@pytest.mark.parametrize("repo_id, name, content, says", DAMAGE)
def test_a_damaged_file_of_a_mirror_is_named(tmp_path, repo_id, name, content, says):
    folder = mirrored(tmp_path, repo_id)
    assert hub.find(kind_of(repo_id), repo_id).path == folder
    (folder / name).write_bytes(content)
    words = [repo_id, str(folder / name), says]
    refused(DamagedCopy, words, lambda: hub.find(kind_of(repo_id), repo_id))


@pytest.mark.parametrize(
    "repo_id, name, lacks",
    [
        (BASE, "model.safetensors", "lacks model.safetensors or pytorch_model.bin"),
        (BASE, "spm.model", "lacks spm.model or tokenizer.json"),
        (VIT, "preprocessor_config.json", "lacks preprocessor_config.json"),
        (CIFAR, "plain_text/test-00000-of-00001.parquet", "lacks test*.parquet"),
    ],
)
def test_an_incomplete_copy_says_which_file_is_missing(tmp_path, repo_id, name, lacks):
    (mirrored(tmp_path, repo_id) / name).unlink()
    refused(hub.HubUnavailable, lacks, lambda: hub.find(kind_of(repo_id), repo_id))


@pytest.mark.parametrize("named", ["~nosuchuser/x", "gone", os.pathsep, " "])
def test_a_mirror_that_cannot_be(monkeypatch, named):
    monkeypatch.setenv("TIGHT_FIT_MIRROR", named)
    refused(hub.HubUnavailable, "cannot be loaded", lambda: hub.find("model", BASE))


class Hangs(BaseHTTPRequestHandler):
    """Answers the first request, and every later one with a byte of header a second."""

    asked = 0

    def log_message(self, *_):
        """Nothing."""

    def do_GET(self):
        Hangs.asked += 1
        if Hangs.asked == 1:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
            return
        try:
            for _ in range(120):
                self.wfile.write(b"H")
                self.wfile.flush()
                time.sleep(0.2)
        except OSError:
            pass

    do_HEAD = do_GET


def test_a_hub_that_answers_once_and_then_hangs_is_given_up(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.delenv("TIGHT_FIT_MIRROR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_silent", None)
    monkeypatch.setattr(hub, "STILL_SECONDS", 1.0)
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.1)
    repo = Repo("a/b", "model", ("main",), ("config.json",), (("config.json",),))
    assert hub.unreachable(repo) is None
    problem, copy = hub.download(repo)
    assert copy is None and "nothing came for 1 seconds" in problem
    assert hub.unreachable(repo) == problem  # and it is not asked again for a while
    one_sentence(f"{problem}.")
    server.shutdown()
