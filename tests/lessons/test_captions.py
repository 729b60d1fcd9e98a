"""Every table of plans says what was planned: precision, optimizer, attention, compiled or not."""

import re

import nbformat
import pytest

from tools.course import NOTEBOOKS

LESSONS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
TABLE = re.compile(
    r"^Planned.*(?:\n.*\b(?:peak|need per GPU|on the GPU|step|taken away|T4|A100-40GB)\b)", re.M
)
SAID = {
    "precision": re.compile(r"\b(?:fp32 (?:with|without) TF32|bf16|fp16)\b"),
    "optimizer": re.compile(r"\b(?:fused AdamW|AdamW)\b"),
    "attention": re.compile(r"\battention\b"),
    "compile": re.compile(r"\bcompiled\b"),
}
SIXTEEN = re.compile(r"\b(?:bf16|fp16)\b")
# Tables that are in fp32 on purpose: before lesson 04 tells of 16 bits, of a script in fp32, the
# ladder, which begins there, and steps that an H200 measured so.
IN_FP32 = {"00": 3, "02": 1, "03": 1, "05": 1, "06": 1, "13": 1, "19": 2}


def captions(nb):
    """The captions of a notebook's tables of planned steps."""
    texts = [
        "".join(output.get("data", {}).get("text/plain", ""))
        for cell in nb.cells
        for output in cell.get("outputs", [])
    ]
    return [text.splitlines()[0] for text in texts if TABLE.match(text)]


def unsaid(caption):
    return [name for name, words in SAID.items() if not words.search(caption)]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_caption_says_how_the_step_was_planned(path):
    found = captions(nbformat.read(path, as_version=4))
    assert {caption: unsaid(caption) for caption in found if unsaid(caption)} == {}
    in_fp32 = [caption for caption in found if not SIXTEEN.search(caption)]
    assert len(in_fp32) == IN_FP32.get(path.name[:2], 0)


def test_most_lessons_have_such_a_table():
    having = [path for path in LESSONS if captions(nbformat.read(path, as_version=4))]
    assert len(having) >= 20


def test_a_caption_that_lacks_one_is_found():
    whole = "Planned: a step, in fp16 autocast, with fused AdamW, eager attention, not compiled."
    assert unsaid(whole) == []
    for words, name in (
        ("fp16 autocast", "precision"),
        ("fused AdamW", "optimizer"),
        ("eager attention", "attention"),
        ("not compiled", "compile"),
    ):
        assert unsaid(whole.replace(words, "")) == [name]
