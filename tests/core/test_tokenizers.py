"""The tokenizer that notebook 08 writes by hand gives the ids of the Rust one, whatever the text.

The code under test is that of lab 08: its cells with `viterbi` and `ByHand` are run here.
"""

import json
import math
import re
import unicodedata
from functools import lru_cache

import nbformat
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers.normalizers import NFKC

from helpers import data, models
from helpers.data import normalise
from helpers.recipe import Recipe
from tests.models.test_hub import make_deberta
from tools.course import NOTEBOOKS

LIBRARIES = {"json": json, "math": math, "re": re, "unicodedata": unicodedata}
OLD = unicodedata.ucd_3_2_0  # Unicode 3.2: every later version normalises its characters alike


def by_hand_of(tokenizer):
    notebook = nbformat.read(NOTEBOOKS / "labs" / "08_fast_tokenizers_lab.ipynb", as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    names = {**LIBRARIES, "tokenizer": tokenizer}
    for head in ("def viterbi(", "class ByHand:"):  # each section of the lab repeats them
        source = next(text for text in sources if text.startswith(head))
        exec(compile(source, "lab 08", "exec"), names)
    return names["by_hand"]


@lru_cache(maxsize=1)
def both():
    """The one by hand and the Rust one."""
    tokenizer = models.processor(Recipe("deberta"))
    made = by_hand_of(tokenizer)
    made.cut = lru_cache(maxsize=100_000)(made.cut)
    return made, tokenizer.backend_tokenizer


def differing(texts, pair=None):
    """The texts whose ids differ."""
    ours, rust = pair or both()
    ids = [encoding.ids for encoding in rust.encode_batch(texts)]
    return [text for text, there in zip(texts, ids, strict=True) if ours(text) != there]


def alike(text):
    """Whether both sides have the same Unicode data for this text: their versions differ."""
    return NFKC().normalize_str(text) == unicodedata.normalize("NFKC", text)


letters = st.characters(exclude_categories=["Cs"])  # a lone surrogate is no text: Rust refuses it
odd = st.sampled_from(
    "ﬁﬀﬃ½№Ⅷ㎏①Ａ［］ｶﾞ"
    "\u0301\u0327\u093c\u200d\ufe0f👩🏽🇩🇪\u200b\u00ad\ufeff\x1c\x85\u2028\u3000\u00a0\u1680 \t\n▁"
)
plain = st.sampled_from("the oil price of grain shr cts net [MASK] [PAD] [UNK] ［SEP］ ".split(" "))
texts = st.lists(st.one_of(letters, odd, plain, st.just(" ")), max_size=60).map("".join)


@settings(max_examples=600, deadline=None)
@given(texts)
@example("")
@example(" \t\n ")
@example("▁▁ ▁")
@example("［MASK］[MASK]")
@example("[UNK]日本[UNK] 日本")
@example("a\u0301\u0327\u0301 ﬁ\u0301")
@example("\u1680oil\x1c\x1d \x85price\u2029")
@example("👩\u200d👩\u200d👧‍👦🇩🇪\ufe0f")
def test_any_text(text):
    assume(alike(text))
    assert differing([text]) == []


def test_every_character_that_unicode_3_2_knew():
    every = map(chr, range(1, 0x110000))
    known = [one for one in every if OLD.category(one) not in ("Cn", "Cs", "Co")]
    assert len(known) > 90_000 and all(map(alike, known))
    assert differing([f"oil{letter}the" for letter in known]) == []
    assert differing(known) == []


def test_a_tokenizer_converted_from_debertas_own_files(tmp_path):
    """As in the full profile, with the tokenizer of the hub: after `normalise`, the same ids."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(make_deberta(tmp_path / "model"))
    samples = ["the  net\tsale [MASK] of gold", "ﬁne grain\nin june", "日本 bank", "THE oil!"]
    samples += data.load("r8")["test"]["text"][:300]
    pair = by_hand_of(theirs), theirs.backend_tokenizer
    assert differing([normalise(text) for text in samples], pair) == []
