"""The bundled mini models: small, reproducible, honest, and loadable as the hub's models are."""

import hashlib
import json
from functools import cache

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoTokenizer,
    DebertaV2ForMaskedLM,
    Qwen3ForCausalLM,
)  # fmt: skip

from helpers import models
from tools.pretrain import (
    corpus,
    pretrain_deberta,
    pretrain_decoder,
    pretrain_vit,
    tokenizer,
)

ROOM = models.MINI
NAMES = ("deberta", "vit", "decoder")
OTHER_CPU = 2e-2  # relative, of the first losses: another CPU or torch only rounds differently


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def card(name: str) -> dict:
    return json.loads((ROOM / name / "card.json").read_text(encoding="utf8"))


@cache
def room() -> dict[str, list[str]]:
    return corpus.load()


@cache
def trained_tokenizer():
    return tokenizer.train(room()["reuters"] + room()["others"])


def test_all_fit_in_eleven_megabytes():
    assert sum(path.stat().st_size for name in NAMES for path in (ROOM / name).iterdir()) <= 11e6


@pytest.mark.parametrize("name", NAMES)
def test_card_matches_files(name):
    facts = card(name)
    for file, digest in facts["sha256"].items():
        content = (ROOM / name / file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, (
            f"{name}/{file} is not the one on the card"
        )
        assert len(content) == facts["bytes"][file]
    with safe_open(ROOM / name / "model.safetensors", "pt") as weights:
        tensors = [weights.get_tensor(key) for key in weights.keys()]
    assert {tensor.dtype for tensor in tensors} == {torch.float16}
    assert sum(tensor.numel() for tensor in tensors) == facts["parameters"] < 3_000_000
    assert all(tensor.isfinite().all() for tensor in tensors)
    prose = (ROOM / name / "README.md").read_text(encoding="utf8")
    for entry in facts["scores"].values():
        for who in ("shipped", "random"):
            assert f"{100 * entry[who]['mean']:.1f} ± {100 * entry[who]['std']:.1f} %" in prose


@pytest.mark.parametrize("name", NAMES)
def test_pretraining_helps_beyond_the_spread(name):
    for steps, entry in card(name)["scores"].items():
        shipped, random = entry["shipped"], entry["random"]
        assert min(shipped["runs"]) > max(random["runs"]), f"{name}, {steps}"
        assert shipped["mean"] - random["mean"] > 2 * (shipped["std"] + random["std"]), (
            f"{name}, {steps}"
        )


@pytest.mark.parametrize(
    "name, kind, text, fits",
    [
        ("deberta", DebertaV2ForMaskedLM, "qtr net shr cts vs [MASK] net mln vs mln revs", "▁cts"),
        ("decoder", Qwen3ForCausalLM, "qtr net shr cts vs cts net mln vs mln revs mln vs", "▁mln"),
    ],
)
def test_a_language_model_loads_whole_and_tied_and_prefers_words_that_fit(name, kind, text, fits):
    model, news = kind.from_pretrained(ROOM / name, dtype=torch.float32, output_loading_info=True)
    assert not news["missing_keys"] and not news["unexpected_keys"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tok = AutoTokenizer.from_pretrained(ROOM / name)
    ids = tok([text], return_tensors="pt")["input_ids"]
    place = ids[0].tolist().index(tok.mask_token_id) if tok.mask_token_id else -1
    logits = model.eval()(ids).logits[0, place]
    fitting, strange = tok.convert_tokens_to_ids([fits, "▁windows"])
    assert logits[fitting] > logits[strange]


def test_near_finds_a_changed_copy_and_spares_another_story():
    story = (
        "the company said its board approved a two for one split of common shares "
        "for holders in april"
    )
    changed = story.replace("april", "may").upper() + " 1987"
    other = (
        "wheat exports to the soviet union fell sharply in the first half of the year "
        "said the department"
    )
    assert corpus.near([changed, other, story[:60]], [story]) == [True, False, True]


@cache
def chat_tokenizer():
    return tokenizer.train_chat(room()["reuters"] + room()["others"])


@pytest.mark.night
def test_no_test_document_in_the_corpus():
    texts = room()["reuters"] + room()["others"]
    forbidden = corpus.held_out()
    assert len(forbidden) > 2500
    spaced = {" ".join(corpus.words(text)) for text in texts}
    assert not spaced & {" ".join(corpus.words(text)) for text in forbidden}
    sizes = {name: len(part) for name, part in room().items()} | {"dropped": corpus.dropped()}
    assert sizes == card("deberta")["corpus"] == card("decoder")["corpus"]


@pytest.mark.night
def test_tokenizer_is_reproducible(tmp_path):
    for model, tok in (("deberta", trained_tokenizer()), ("decoder", chat_tokenizer())):
        tok.save_pretrained(tmp_path / model)
        for path in (tmp_path / model).iterdir():
            assert path.read_bytes() == (ROOM / model / path.name).read_bytes()


def trained(name):
    """The losses of the first steps of a model, trained as its card says."""
    plan = card(name)["plan"]
    if name == "vit":
        return pretrain_vit.train(pretrain_vit.ImagePretraining(**plan), stop=3)[1]
    if name == "decoder":
        rooms, plan = (
            corpus.encode(room(), chat_tokenizer()),
            pretrain_decoder.DecoderPretraining(**plan),
        )
        return pretrain_decoder.train(plan, rooms, stop=3)[1]
    rooms, plan = (
        corpus.encode(room(), trained_tokenizer()),
        pretrain_deberta.TextPretraining(**plan),
    )
    return pretrain_deberta.train(plan, rooms, stop=3)[1]


@pytest.mark.night
@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_are_the_cards(name):
    for now, then in zip(trained(name), card(name)["first_losses"][:3], strict=True):
        assert now == pytest.approx(then, rel=OTHER_CPU)
