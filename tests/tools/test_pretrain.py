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


def test_masked_lm_loads_whole_and_prefers_words_that_fit():
    model, news = DebertaV2ForMaskedLM.from_pretrained(
        ROOM / "deberta", dtype=torch.float32, output_loading_info=True
    )
    assert not news["missing_keys"] and not news["unexpected_keys"]
    assert model.cls.predictions.decoder.weight is model.deberta.embeddings.word_embeddings.weight
    tok = AutoTokenizer.from_pretrained(ROOM / "deberta")
    rows = tok(
        ["qtr net shr cts vs [MASK] net mln vs mln revs mln vs mln reuter"], return_tensors="pt"
    )
    logits = model.eval()(**rows).logits[0, rows["input_ids"][0].tolist().index(tok.mask_token_id)]
    fitting, strange = tok.convert_tokens_to_ids(["▁cts", "▁windows"])
    assert logits[fitting] > logits[strange]


def test_decoder_loads_in_float32_whole_and_tied_and_prefers_words_that_fit():
    model, news = Qwen3ForCausalLM.from_pretrained(
        ROOM / "decoder", dtype=torch.float32, output_loading_info=True
    )
    assert not news["missing_keys"] and not news["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tok = AutoTokenizer.from_pretrained(ROOM / "decoder")
    rows = tok(["qtr net shr cts vs cts net mln vs mln revs mln vs"], return_tensors="pt")
    logits = model.eval()(rows["input_ids"]).logits[0, -1]
    fitting, strange = tok.convert_tokens_to_ids(["▁mln", "▁windows"])
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


def test_every_test_document_with_a_word_changed_would_be_dropped():
    forbidden = [text for text in corpus.held_out() if len(text.split()) > 30][:200]
    assert all(corpus.near([text.replace(" the ", " a ", 1) for text in forbidden], forbidden))


@pytest.mark.night
def test_tokenizer_is_reproducible(tmp_path):
    for model, tok in (("deberta", trained_tokenizer()), ("decoder", chat_tokenizer())):
        tok.save_pretrained(tmp_path / model)
        for path in (tmp_path / model).iterdir():
            assert path.read_bytes() == (ROOM / model / path.name).read_bytes()


@pytest.mark.night
def test_first_deberta_steps_are_the_cards():
    facts = card("deberta")
    rooms = corpus.encode(room(), trained_tokenizer())
    _, log = pretrain_deberta.train(
        pretrain_deberta.TextPretraining(**facts["plan"]), rooms, stop=3
    )
    for now, then in zip(log, facts["first_losses"]):
        assert now == pytest.approx(then, rel=OTHER_CPU)


@pytest.mark.night
def test_first_decoder_steps_are_the_cards():
    facts = card("decoder")
    rooms = corpus.encode(room(), chat_tokenizer())
    _, log = pretrain_decoder.train(
        pretrain_decoder.DecoderPretraining(**facts["plan"]), rooms, stop=3
    )
    assert log == pytest.approx(facts["first_losses"][:3], rel=OTHER_CPU)


@pytest.mark.night
def test_first_vit_steps_are_the_cards():
    facts = card("vit")
    _, log = pretrain_vit.train(pretrain_vit.ImagePretraining(**facts["plan"]), stop=5)
    assert log == pytest.approx(facts["first_losses"][:5], rel=OTHER_CPU)
