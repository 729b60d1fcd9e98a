"""docs/reliability.md counts the cases that there are."""

import pytest

from tests.attack import PAGE, counted, one_sentence, refused, table


def test_the_page_counts_the_cases_that_are_collected():
    text = PAGE.read_text(encoding="utf8")
    written = text.partition("<!-- attack -->\n")[2].partition("\n<!-- /attack -->")[0]
    assert written == table(counted()), "stale: run `python -m tests.attack`"


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
