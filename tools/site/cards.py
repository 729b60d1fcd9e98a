"""The site's list of lessons: a card for each, with the first of its drawings."""

from __future__ import annotations

import html
import re
from pathlib import Path

from helpers.plots import DRAWINGS
from tools.course.blocks import recorded, title

TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.S)


def drawing(number: str) -> Path:
    """A lesson's first drawing. Raises ValueError where the lesson has none."""
    found = sorted(DRAWINGS.glob(f"{number}_*.svg"))
    if not found:
        raise ValueError(f"Lesson {number} has no drawing: put one into {DRAWINGS.name}/.")
    return found[0]


def cards(lessons: list[Path]) -> str:
    """The lessons as HTML for the page docs/lessons, with links to their pages and labs."""
    return '<div class="lessons">\n' + "\n".join(map(_card, lessons)) + "\n</div>\n"


def _card(lesson: Path) -> str:
    number = lesson.stem[:2]
    picture = drawing(number)
    shown = TITLE.search(picture.read_text(encoding="utf8"))
    measured = f"<p>{html.escape(text)}</p>" if (text := recorded(lesson.stem)) else ""
    assert shown is not None, "a test holds that every drawing has a title"
    name = re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(title(lesson), quote=False))
    return (
        f'<div class="lesson"><a href="../notebooks/{lesson.stem}.html">'
        f'<img src="drawings/{picture.name}" alt="{html.escape(" ".join(shown[1].split()))}">'
        f"<span>{number} {name}</span></a>"
        f'{measured}<a href="../notebooks/labs/{lesson.stem}_lab.html">Lab {number}</a></div>'
    )
