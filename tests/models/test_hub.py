"""Where repositories come from: mirror, cache, hub, or one sentence that says why not.

The repositories are small ones under the real names.
"""

import itertools
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.small import ROOT, python
from tight_fit.models import hub
from tight_fit.models.local import MIRROR, LocalCopy
from tight_fit.models.repositories import REPOS

BASE, VIT = "microsoft/deberta-v3-base", "google/vit-base-patch16-224-in21k"
CIFAR = "uoft-cs/cifar10"
MAIN = "8ccc9b6f36199bec6961081d44eb72fb3f7353f3"  # that DeBERTa's cached main branch holds
STUB = {
    BASE: ("config.json", "spm.model", "model.safetensors"),
    VIT: ("config.json", "preprocessor_config.json", "model.safetensors"),
    CIFAR: ("plain_text/train-00000-of-00001.parquet", "plain_text/test-00000-of-00001.parquet"),
}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No mirror, an empty cache, no hub."""
    monkeypatch.delenv("TIGHT_FIT_MIRROR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "unreachable", lambda repo: "no answer from the hub")


SMALLEST = {  # of each kind of file, what is no damage
    ".json": b"{}",
    ".model": b"\n\x01x",
    ".safetensors": b"\x02" + bytes(7) + b"{}",
    ".parquet": b"PAR1" + bytes(4) + b"PAR1",
}


def stub(folder, repo_id, leave_out=()):
    """A folder with the files that make a repository complete, each as small as it may be."""
    for name in STUB[repo_id]:
        if name not in leave_out:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(SMALLEST[Path(name).suffix])
    return folder


def make_deberta(folder):
    """DeBERTa-v3's repository as on the hub, but tiny: no tokenizer.json, weights in fp16."""
    import sentencepiece
    from transformers import DebertaV2Config, DebertaV2Model

    folder.mkdir(parents=True, exist_ok=True)
    words = ("net", "new", "old"), ("sale", "price"), ("oil", "grain", "gold"), ("may", "the bank")
    lines = ["the {} {} of {} in {}".format(*chosen) for chosen in itertools.product(*words)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=f"{folder}/spm", vocab_size=60,
        hard_vocab_limit=False, pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]",
        bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]", minloglevel=2,
    )  # fmt: skip
    (folder / "spm.vocab").unlink()
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false, "vocab_type": "spm"}')
    DebertaV2Model(
        DebertaV2Config(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, relative_attention=True, pos_att_type=["p2c", "c2p"],
            position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True, type_vocab_size=0,
        )
    ).half().save_pretrained(folder)  # fmt: skip
    return folder


def cached(home, repo_id, commit):
    """An empty snapshot of a model in a hub cache, with the main branch pointing at it."""
    folder = home / f"models--{repo_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    return folder / "snapshots" / commit


def test_an_unknown_repository_is_refused():
    for ask in (hub.find, hub.available):
        with pytest.raises(ValueError, match="does not use the model 'bert': it knows model micro"):
            ask("model", "bert")


@pytest.mark.parametrize("kind, repo_id", [("model", BASE), ("dataset", CIFAR)])
@pytest.mark.parametrize(
    "layout", ["{kind}s/{owner}/{name}", "{owner}/{name}", "{owner}--{name}", "{name}"]
)
def test_every_mirror_layout(tmp_path, monkeypatch, kind, repo_id, layout):
    owner, name = repo_id.split("/")
    folder = stub(tmp_path / "mirror" / layout.format(kind=kind, owner=owner, name=name), repo_id)
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path / "mirror"))
    assert hub.find(kind, repo_id) == LocalCopy(REPOS[kind, repo_id], folder, "mirror", None)
    assert hub.available(kind, repo_id) == "mirror"


@pytest.mark.parametrize("inside", ["", "hub"])
def test_a_mirror_may_be_a_hub_cache(tmp_path, monkeypatch, inside):
    snapshot = stub(cached(tmp_path / "mirror" / inside, BASE, "f" * 40), BASE)
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path / "mirror"))
    assert hub.find("model", BASE) == LocalCopy(REPOS["model", BASE], snapshot, "mirror", "f" * 40)


def test_several_mirrors_are_searched_in_order_and_copies_that_are_not_whole_passed_over(
    tmp_path, monkeypatch
):
    gone, broken, *held = (tmp_path / name for name in ("gone", "broken", "a", "b"))
    monkeypatch.setenv("TIGHT_FIT_MIRROR", os.pathsep.join(map(str, (gone, broken))))
    folder = stub(broken / BASE, BASE, leave_out=["model.safetensors"])
    (folder / "model.safetensors").symlink_to("blobs/gone")  # as a copied cache may hold it
    with pytest.raises(hub.HubUnavailable, match="broken, which has no complete copy of it"):
        hub.find("model", BASE)
    paths = [stub(mirror / BASE, BASE) for mirror in held]
    monkeypatch.setenv("TIGHT_FIT_MIRROR", os.pathsep.join(map(str, (gone, broken, *held))))
    assert hub.find("model", BASE).path == paths[0]
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert hub.find("model", BASE).path == folder
    stub(broken / VIT, VIT, leave_out=["model.safetensors"])
    (broken / VIT / "pytorch_model.bin").touch()  # a pickle, which is taken for DeBERTa alone
    assert hub.available("model", VIT) is None


def test_tokens_of_a_mirror_are_those_of_sentencepiece(tmp_path):
    """The text has ligatures and control characters."""
    import sentencepiece
    from transformers import AutoTokenizer

    from helpers import data, sets

    folder = make_deberta(tmp_path)
    golden = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    rows = [
        "the new price of oil",
        " the new  price\n\n\tof oil\r\n",
        "the net\u200bsale\x07 of gold\u3000may \uff21",
        "\ufb01ve \u2581oil",
        "the\ufeff bank \u061cof",
    ]
    split = sets.build([0] * len(rows), rows, ["x"], "test", "")
    recipe = SimpleNamespace(task="text", model="deberta", batch_size=4, tokens=40, padding="fixed")
    encoded = data.encode(split, recipe, AutoTokenizer.from_pretrained(folder))
    for row, length in enumerate(encoded.lengths.tolist()):
        ids = encoded.columns["input_ids"][row].tolist()
        assert ids[:length] == [1] + golden.encode(rows[row]) + [2]
        assert ids[length:] == [0] * (40 - length)
    assert 3 not in encoded.columns["input_ids"][1]  # no [UNK]


def test_a_decoder_is_whole_only_with_all_its_shards(tmp_path, monkeypatch):
    files = ("config.json", "tokenizer.json", "tokenizer_config.json")
    shards = ["model.safetensors.index.json"]
    shards += [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    larger = "Qwen/Qwen3-1.7B"
    monkeypatch.setitem(STUB, larger, (*files, *shards))
    folder = stub(tmp_path / "mirror" / larger, larger, leave_out=shards[2:])
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path / "mirror"))
    with pytest.raises(hub.HubUnavailable, match="lacks model-00002-of-00002.safetensors"):
        hub.find("model", larger)
    stub(folder, larger)
    assert hub.find("model", larger).source == "mirror"


def test_the_cache_takes_another_than_the_pinned_commit_only_without_the_hub(tmp_path, monkeypatch):
    pinned = REPOS["model", BASE].revisions[0]
    other = stub(cached(tmp_path / "cache", BASE, "f" * 40), BASE)
    assert hub.find("model", BASE).path == other
    assert hub.available("model", BASE) == "cache"
    monkeypatch.setattr(hub, "unreachable", lambda repo: None)
    assert hub.available("model", BASE) == "hub"
    stub(other.parent / pinned, BASE)
    found = hub.find("model", BASE)
    assert (found.source, found.revision) == ("cache", pinned)


def run(code, **environment):
    """The JSON that Python code prints in a process of its own."""
    ours = ("HF_", "TIGHT_FIT", "TRANSFORMERS_")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ours) and "proxy" not in name.lower()
    }
    done = python(
        "-c", code, env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


NO_NETWORK = """
import json, socket
attempts = []
def refuse(*arguments, **settings):
    attempts.append(arguments)
    raise OSError("the network is off")
socket.getaddrinfo = socket.socket.connect = socket.socket.connect_ex = refuse
"""


def test_a_cached_model_loads_offline_without_touching_the_network(tmp_path):
    make_deberta(cached(tmp_path / "hub", BASE, MAIN))
    answer = run(
        NO_NETWORK
        + f"""
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from tight_fit.models import hub
found = hub.find("model", "{BASE}")
tokenizer = AutoTokenizer.from_pretrained(found.path)
model = AutoModelForSequenceClassification.from_pretrained(
    found.path, use_safetensors=True, dtype=torch.float32, num_labels=3)
logits = model(**tokenizer(["the new price of oil"], return_tensors="pt")).logits
finite = bool(logits.isfinite().all())
print(json.dumps([found.source, found.revision, *logits.shape, finite, len(attempts)]))
""",
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    assert answer == ["cache", MAIN, 1, 3, True, 0]


FIND = f"""
from tight_fit.models import hub
said = []
for kind, name in [("model", "{BASE}"), ("dataset", "{CIFAR}")]:
    assert hub.available(kind, name) is None and issubclass(hub.HubUnavailable, OSError)
    try:
        hub.find(kind, name)
    except hub.HubUnavailable as error:
        said.append(str(error))
print(json.dumps([said, len(attempts)]))
"""


def test_without_network_mirror_and_cache_one_sentence_after_one_attempt(tmp_path):
    """And after none in offline mode."""
    gone = str(tmp_path / "gone")
    sentences, attempts = run(NO_NETWORK + FIND, HF_HOME=str(tmp_path), TIGHT_FIT_MIRROR=gone)
    assert attempts == 1
    for sentence, folder in zip(sentences, (f"models/{BASE}", f"datasets/{CIFAR}"), strict=True):
        assert ". " not in sentence and "\n" not in sentence
        assert sentence.endswith("TIGHT_FIT_PROFILE=mini.")
        for words in (
            "connect to the internet",
            f"set TIGHT_FIT_MIRROR to a folder that holds {folder}",
            "gone, which is no folder",
            "no answer from https://huggingface.co",
        ):
            assert words in sentence
    sentences, attempts = run(NO_NETWORK + FIND, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert attempts == 0 and len(sentences) == 2
    for said in sentences:
        assert "HF_HUB_OFFLINE is set" in said and f"{MIRROR} is not set" in said


class Hub(BaseHTTPRequestHandler):
    """Serves `files`, {commit: {name: bytes}}, of BASE; server.fetched has what was downloaded."""

    def log_message(*_):
        return None  # quiet

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0].strip("/").split("/")
        if self.status != 200:
            return self.reply(self.status)
        if path[:4] == ["api", "models", *BASE.split("/")]:
            names = self.files.get(path[5]) if path[5:] else {}
            if names is None:
                return self.reply(404, X_Error_Code="RevisionNotFound")
            told = {
                "id": BASE,
                "sha": path[-1],
                "siblings": [{"rfilename": name} for name in names],
            }
            if path[4:5] == ["tree"]:
                told = [
                    {"type": "file", "path": name, "size": len(body), "oid": f"{len(body):040x}"}
                    for name, body in names.items()
                ]
            return self.reply(200, json.dumps(told).encode())
        commit, name = path[3], path[4]
        if self.command == "GET":
            self.server.fetched.append(name)
        tag = f'"{commit[:8]}{name}"'
        self.reply(200, self.files[commit][name], ETag=tag, X_Repo_Commit=commit)

    do_HEAD = do_GET


def ask_hub(home, files, status=200):
    """What `find` answers against a hub that has these files, and the files that it fetched."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Served", (Hub,), {"files": files, "status": status})
    )
    server.fetched = fetched = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        answer = run(
            f"""
import json
from tight_fit.models import hub
try:
    found = hub.find("model", "{BASE}")
    again = hub.find("model", "{BASE}").source
    converted = bool(found.files("*.safetensors"))
    print(json.dumps([found.source, found.revision, again, converted]))
except hub.HubUnavailable as error:
    print(json.dumps([None, str(error)]))
""",
            HF_HOME=str(home),
            HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
            HF_HUB_DISABLE_XET="1",
        )
    finally:
        server.shutdown()
        server.server_close()
    return answer, sorted(fetched)


REMOTE = {
    "config.json": b"{}", "spm.model": SMALLEST[".model"], "tokenizer_config.json": b"{}",
    "pytorch_model.bin": b"b" * 9, "rust_model.ot": b"r" * 99, "tf_model.h5": b"t" * 99,
}  # fmt: skip


def test_the_hub_is_asked_for_the_pinned_commit_and_only_for_what_is_read(tmp_path):
    pinned = REPOS["model", BASE].revisions[0]
    converted = {**REMOTE, "model.safetensors": SMALLEST[".safetensors"]}
    answer, fetched = ask_hub(tmp_path / "a", {pinned: converted, MAIN: REMOTE})
    assert answer == ["hub", pinned, "cache", True]
    assert fetched == ["config.json", "model.safetensors", "spm.model", "tokenizer_config.json"]
    answer, fetched = ask_hub(tmp_path / "b", {MAIN: REMOTE})  # main's commit is the second choice
    assert answer[:2] == ["hub", MAIN] and answer[3] is False
    assert fetched == ["config.json", "pytorch_model.bin", "spm.model", "tokenizer_config.json"]


@pytest.mark.parametrize(
    "files, status, reason",
    [
        ({}, 200, "the hub has none of the pinned commits"),
        ({MAIN: {"config.json": b"{}"}}, 200, "the hub's copy lacks files"),
        ({MAIN: REMOTE}, 403, "the hub answered with status 403"),
    ],
)
def test_what_the_hub_refuses_is_said(tmp_path, files, status, reason):
    answer, _ = ask_hub(tmp_path, files, status)
    assert answer[0] is None
    assert reason in answer[1]
    assert answer[1].endswith("TIGHT_FIT_PROFILE=mini.")


def test_a_broken_download_falls_back_and_a_full_disk_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "unreachable", lambda repo: None)
    asked = []

    def fail(error):
        def download(*arguments, **settings):
            asked.append(settings["revision"])
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    fail(ConnectionError("reset"))
    with pytest.raises(hub.HubUnavailable, match="the download broke off .ConnectionError."):
        hub.find("model", BASE)
    stub(cached(tmp_path / "cache", BASE, MAIN), BASE)
    assert hub.find("model", BASE).source == "cache"  # main's commit, once the pinned one is asked
    assert asked == [REPOS["model", BASE].revisions[0]] * 2
    fail(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        hub.find("model", BASE)
