"""docs/reliability.md counts the cases that there are."""

import re
from collections import Counter

import pytest

from tests.attack import PAGE, one_sentence, refused, sections, table


def test_the_page_counts_the_cases_that_are_collected(cases):
    text = PAGE.read_text(encoding="utf8")
    rows = text.partition("<!-- attack -->")[2].partition("<!-- /attack -->")[0]
    written = dict(re.findall(r"^\| ([^|*]+) \| (\d+) \|", rows, re.M))
    for file, (title, tried) in sections().items():
        assert written.get(title) == str(cases[file]), "stale: run `python -m tests.attack`"
        assert f"| {tried} |" in rows, "stale: run `python -m tests.attack`"
    total = int(re.search(r"\*\*all\*\* \| \*\*(\d+)\*\*", rows)[1])
    assert total == sum(map(int, written.values()))
    assert written.keys() == {title for title, _ in sections().values()}


def test_a_table_has_a_row_for_each_section_and_their_sum():
    file, (title, _) = next(iter(sections().items()))
    text = table(Counter({file: 7}))
    assert f"| {title} | 7 |" in text and text.endswith("| **all** | **7** | |")


@pytest.mark.parametrize(
    "text",
    ["one\ntwo", "No full stop", "Traceback (most recent call last): x.", "x" * 700 + ".", ""],
)
def test_what_is_no_sentence_is_found(text):
    with pytest.raises(AssertionError):
        one_sentence(text)


def test_a_sentence_may_follow_the_usage_and_must_say_its_parts():
    assert one_sentence("usage: x [-h]\n         [--y]\nx: error: y=3 is odd.\n", "y=3")
    with pytest.raises(AssertionError, match="does not say"):
        one_sentence("y=3 is odd.", "y=4")
    with pytest.raises(AssertionError):
        refused(ValueError, "odd", lambda: int("3.0.0"))
