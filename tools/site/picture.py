"""The picture of a lesson in README: its first screen on the site, by Chromium."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.course import ROOT

LESSON = "notebooks/06_gradient_checkpointing.html"
FILE = ROOT / "docs" / "lesson.png"
PART = "article"  # of the page, without menus
WIDTH, HEIGHT, MARGIN = 900, 460, 16  # pixels


def write(site: Path, file: Path = FILE) -> Path:
    """Write the picture of a lesson of a built site.

    Raises FileNotFoundError where Chromium is missing.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise FileNotFoundError("The picture is taken by Chromium: install chromium.")
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto((site / LESSON).as_uri())
        box = page.locator(PART).first.bounding_box()
        assert box is not None, "the page has its article"
        left, top = box["x"] - MARGIN, box["y"]
        clip = {"x": left, "y": top, "width": box["width"] + 2 * MARGIN, "height": HEIGHT}
        page.screenshot(path=file, clip=clip, full_page=True)
        browser.close()
    return file
